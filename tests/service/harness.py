"""`prefixcache serve`, the real command, on an engine whose passes can be made to fail.

    python -m tests.service.harness serve --model … --port 0

A request decides by its request_id what befalls it: one that holds `raise-exception` or
`raise-memory` fails in each forward pass, `lose-device` takes the accelerator with it, which stops
the engine's loop. By chance too, with `FAULTS_SEED` and `FAULTS_RATE` in the environment. Integrity
is checked before every step, and a step takes at least `FAULTS_STEP_SECONDS`. Each line on standard
input is answered by one of JSON on standard output: what the process holds, and what was injected.
"""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Sequence

import torch

from prefixcache.engine.engine import Engine
from prefixcache.engine.scheduler import ScheduledRow
from prefixcache_service.cli import main
from tests.engine.seeded import InjectedFault, SeededFaults


class Harness(SeededFaults):
    def __init__(self) -> None:
        rate = float(os.environ.get("FAULTS_RATE", "0"))
        seed = int(os.environ.get("FAULTS_SEED", "0"))
        super().__init__(seed, exceptions=rate / 2, out_of_memory=rate / 2)
        self.num_checks = 0
        self.engine: Engine | None = None
        self._pause = float(os.environ.get("FAULTS_STEP_SECONDS", "0"))

    def before_step(self, engine: Engine) -> None:
        self.engine = engine
        engine.check_integrity()
        self.num_checks += 1
        time.sleep(self._pause)

    def before_forward(self, rows: Sequence[ScheduledRow]) -> None:
        super().before_forward(rows)
        for name in [row.group.request_id for row in rows]:
            if "raise-exception" in name:
                raise InjectedFault(name)
            if "raise-memory" in name:
                raise MemoryError(name)
            if "lose-device" in name:
                raise torch.AcceleratorError(name)

    def report(self) -> dict[str, int]:
        gc.collect()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        manager = None if self.engine is None else self.engine.manager
        return {
            "resident_bytes": resident,
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
            "steps_checked": self.num_checks,
            "faults": self.num_raised,
            "requests_failed_by_faults": len(self.failed),
            "tables": len(manager.tables) if manager else 0,
            "leases": len(manager.leases) if manager else 0,
        }


def answer(harness: Harness) -> None:
    for _ in sys.stdin:
        print(json.dumps(harness.report()), flush=True)


if __name__ == "__main__":
    harness = Harness()

    make = Engine.__init__

    def make_with_injection(self: Engine, *arguments: object, **named: object) -> None:
        make(self, *arguments, **named, injection=harness)  # type: ignore[arg-type]

    Engine.__init__ = make_with_injection  # type: ignore[method-assign]
    threading.Thread(target=answer, args=(harness,), daemon=True).start()
    main()
