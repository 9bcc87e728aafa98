"""Fuzzing for as long as one likes: other inputs each time, target after target.

    python -m tests.fuzz --minutes 60
    python -m tests.fuzz --minutes 5 --target gguf --seed 7

Stops at the first fault, prints it, and keeps the smallest input that shows it in `tests/corpus`,
where every run of the tests tries it first.
"""

import argparse
import hashlib
import random
import sys
import time
import traceback
from typing import Any

from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import TARGETS

ROUND = 500
"""Inputs of one target before it is the next one's turn."""


class Fault(Exception):
    """What a target was found to do, and the input that makes it."""

    def __init__(self, target: Target, one: Any) -> None:
        super().__init__(target.name)
        self.target, self.one = target, one


def round_of(target: Target, seed: int) -> int:
    """Try a round of inputs; how many there were. Raises Fault."""
    tried: list[Any] = []

    with target.open() as check:

        def noted(one: Any) -> None:
            tried.append(one)
            check(one)

        try:
            target.explore(noted, ROUND, seed)
        except Exception as error:
            raise Fault(target, tried[-1]) from error  # the smallest one is tried last
    return len(tried)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--target", choices=TARGETS, action="append", help="repeatable; else all")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    given = parser.parse_args()
    names = given.target or list(TARGETS)
    end, seed, total = time.monotonic() + 60 * given.minutes, given.seed, 0
    try:
        while time.monotonic() < end:
            for name in names:
                total += round_of(TARGETS[name], seed)
                print(f"{name}: seed {seed}, {total} inputs in all", flush=True)
            seed += 1
    except Fault as fault:
        traceback.print_exception(fault)
        data = fault.target.dump(fault.one)
        kept = CORPUS / fault.target.name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
        kept.write_bytes(data)
        print(f"seed {seed}: kept in {kept}", file=sys.stderr)
        return 1
    print(f"{total} inputs, no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
