"""Ours beside other servers, on the same weights, in turn, on this machine.

    python -m benchmarks.peers --json [--peers openvino,vllm,transformers,llamacpp] [--repeats 3]
        [--write docs/performance.md]

Builds an environment for each peer from the package registry (minutes the first time; one of them
compiles for a quarter of an hour), then runs every server in a process of its own, one alive at a
time, `--repeats` times round. All get the same prompts as token ids and must return the same
number of tokens; ends are ignored; each is warmed up first, and the clock is the same code
(`peer_runners/_loop.py`). OpenVINO runs in its default configuration and with f32 KV cache and no
dynamic quantisation, and is judged by the faster. Ours runs in float32, and once more with int8
activations: keys with `int8` in them.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._report import Report
from benchmarks.peer_runners import environments, floors, page
from prefixcache.model.default_model import pull_default_model

PREFIX, OWN = 1_024, 32
TIMEOUT_S = 1_800
SETTLE_S = 2.0
Timings = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One comparison. prompt: `prefix` tokens and `own` ones behind; `calls` times, each its own.

    warm: the prefix has been seen before the clock starts, behind another last token.
    once: only in the last round, because some of the peers take minutes over it.
    """

    name: str
    max_tokens: int
    n: int = 1
    kind: str = "sample"
    prompts: int = 1
    own: int = 1
    warm: bool = True
    calls: int = 1
    once: bool = False

    @property
    def unit(self) -> str:
        beam = "steps/s" if self.kind == "beam" else "tok/s"
        return {"warm_ttft": "first tokens/s", "prefill": "prompt tok/s"}.get(self.name, beam)

    def rate(self, seconds: float) -> float:
        """The row's figure, higher is better."""
        if self.name == "prefill":
            return PREFIX / seconds
        beam = self.kind == "beam"
        return (1 if beam else self.n * self.prompts) * self.max_tokens / seconds

    def job(self) -> dict[str, Any]:
        """For a runner. Prompts depend on the row's name alone: all servers get the same."""
        draw = random.Random(self.name)
        prefix = ids(draw, PREFIX - (not self.warm and self.prompts == 1))
        warm = [prefix + ids(draw, self.own)] if self.warm else []
        calls = []
        for call in range(self.calls):
            if call and not self.warm:
                prefix = ids(draw, len(prefix))
            calls.append([prefix + ids(draw, self.own) for _ in range(self.prompts)])
        job = {"name": self.name, "kind": self.kind, "n": self.n, "max_tokens": self.max_tokens}
        return {**job, "warm": warm, "calls": calls}

    def floor(self, shape: floors.Shape, machine: floors.Machine) -> float:
        """The rate that this machine could not go beyond, in float32."""
        computed = self.own * self.prompts + (0 if self.warm else PREFIX)
        seconds = floors.floor_seconds(
            shape,
            machine,
            sequences=self.n * self.prompts,
            behind=PREFIX,
            computed=computed,
            steps=self.max_tokens,
        )
        return self.rate(seconds)


def ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(100, 40_000) for _ in range(count)]


ROWS = (
    Row("prefill", 1, warm=False, calls=3),
    Row("warm_ttft", 1, calls=7),
    Row("single", 64, calls=2),
    Row("n16", 64, n=16),
    Row("shared16", 64, prompts=16, own=OWN),
    Row("shared16_cold", 64, prompts=16, own=OWN, warm=False, once=True),
    Row("beam4", 32, n=4, kind="beam"),
    Row("beam16", 32, n=16, kind="beam", once=True),
    Row("beam64", 32, n=64, kind="beam", once=True),
)
BEAMS = tuple(row.name for row in ROWS if row.kind == "beam")
WARM_UP = (
    Row("warm-up-sample", 8, n=16, own=8),
    Row("warm-up-single", 8, own=8),
    Row("warm-up-beam", 8, n=4, kind="beam", own=8),
)


@dataclass(frozen=True)
class Server:
    """A peer in one configuration; `peer` is None for ours."""

    name: str
    peer: environments.Peer | None
    settings: dict[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] = tuple(row.name for row in ROWS)


F32 = {
    "properties": {
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        # where the processor has bfloat16 the default is that, and takes no f32 keys and values
        "INFERENCE_PRECISION_HINT": "f32",
    }
}
SERVERS = (
    Server("ours", None),
    Server("ours_int8", None, {"activation_quantization": "int8"}),
    Server("openvino", environments.PEERS["openvino"]),
    Server("openvino_f32", environments.PEERS["openvino"], F32),
    Server("vllm", environments.PEERS["vllm"], {"dtype": "float32"}),
    Server("transformers", environments.PEERS["transformers"], rows=BEAMS),
    Server("llamacpp", environments.PEERS["llamacpp"], rows=("single",)),
)

Keys = dict[str, tuple[tuple[str, ...], str, float | None]]
# key: (rows, of which the one least in our favour counts; peer; bound)
KEYS: Keys = {
    "n16_vs_openvino": (("n16",), "openvino", 1.3),
    "n16_vs_vllm": (("n16",), "vllm", 1.6),
    "shared16_vs_vllm": (("shared16", "shared16_cold"), "vllm", 2.0),
    "shared16_vs_openvino": (("shared16", "shared16_cold"), "openvino", 1.3),
    "single_vs_openvino": (("single",), "openvino", 1.3),
    "single_vs_llamacpp": (("single",), "llamacpp", 1.0),
    "prefill_vs_openvino": (("prefill",), "openvino", 0.75),
    "warm_ttft_vs_openvino": (("warm_ttft",), "openvino", 1.0),
    "beam4_vs_openvino": (("beam4",), "openvino", 1.5),
    "beam4_vs_vllm": (("beam4",), "vllm", 5.0),
    "beam4_vs_transformers": (("beam4",), "transformers", 3.0),
}
# The same against ours with int8 activations. Only the first has a bound of its own.
INT8_KEYS: Keys = {
    "prefill_int8_vs_openvino": (("prefill",), "openvino", 1.0),
    "warm_ttft_int8_vs_openvino": (("warm_ttft",), "openvino", None),
    "single_int8_vs_openvino": (("single",), "openvino", None),
    "single_int8_vs_llamacpp": (("single",), "llamacpp", None),
    "n16_int8_vs_openvino": (("n16",), "openvino", None),
    "n16_int8_vs_vllm": (("n16",), "vllm", None),
    "shared16_int8_vs_openvino": (("shared16", "shared16_cold"), "openvino", None),
    "shared16_int8_vs_vllm": (("shared16", "shared16_cold"), "vllm", None),
    "beam4_int8_vs_openvino": (("beam4",), "openvino", None),
}


def main() -> None:
    report = Report("peers", "Ours beside other servers on the same weights, in turn.")
    names = ",".join(environments.PEERS)
    report.parser.add_argument("--peers", default=names, help=f"of {names}")
    report.parser.add_argument("--repeats", type=int, default=3)
    report.parser.add_argument("--rows", default="", help="only these rows, with commas")
    report.parser.add_argument("--write", type=Path, help="put the tables into this page as well")
    options = report.parse()
    asked = options.peers.split(",")
    if unknown := set(asked) - set(environments.PEERS):
        report.parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    rows = [row for row in ROWS if not options.rows or row.name in options.rows.split(",")]
    gguf = pull_default_model()
    missing = {name: "not asked for" for name in environments.PEERS if name not in asked}
    missing |= dict(unavailable(report, asked, gguf))
    servers = [s for s in SERVERS if s.peer is None or s.peer.name not in missing]
    repeats = 1 if options.quick else options.repeats
    machines = [floors.measure()]
    results: dict[str, list[Timings]] = {server.name: [] for server in servers}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for repeat in range(repeats):
            machines.append(floors.measure())
            for server in servers:
                last = repeat == repeats - 1 and not options.quick
                wanted = [r for r in rows if r.name in server.rows and (last or not r.once)]
                if wanted:
                    results[server.name].append(run(report, server, wanted, gguf))
    except KeyboardInterrupt:
        report.progress("!!! INTERRUPTED: what follows is what had been measured until then")
    tell(report, rows, results, gguf, floors.best(machines))
    compare(report, results, "ours", KEYS)
    compare(report, results, "ours_int8", INT8_KEYS)
    report.add("missing_peers", "; ".join(f"{k}: {v}" for k, v in missing.items()) or None)
    if options.write:
        bounds = {key: bound for key, (_, _, bound) in (KEYS | INT8_KEYS).items()}
        page.write(options.write, report.figures, bounds, {row.name: row.unit for row in ROWS})
    report.finish()


def unavailable(report: Report, asked: list[str], gguf: Path) -> Iterator[tuple[str, str]]:
    """Build what is asked for; what cannot be built, and why, loudly."""
    for name in asked:
        report.progress(f"{name}: its environment")
        try:
            environments.build(environments.PEERS[name])
            if name in ("vllm", "transformers"):
                environments.safetensors(gguf)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            report.progress(f"!!! {name.upper()} IS NOT COMPARED: {error}")
            yield name, f"cannot be installed: {error}"[:200]


def run(report: Report, server: Server, rows: list[Row], gguf: Path) -> Timings:
    """One server in a process of its own, from its start to its end; {} where it fails."""
    peer = server.peer
    own = environments.RUNNERS / "run_ours.py"
    line = [str(peer.python), str(peer.script)] if peer else [sys.executable, str(own)]
    warm_up = [row.job() for row in WARM_UP if row.kind in {wanted.kind for wanted in rows}]
    job = {
        "gguf": str(gguf),
        "safetensors": str(environments.safetensors_directory(gguf)),
        "settings": server.settings,
        "warm_up": [short(row) for row in warm_up if server.name != "llamacpp" or row["n"] == 1],
        "rows": [row.job() for row in rows],
    }
    log = environments.peers_directory() / f"{server.name}.log"
    report.progress(f"{server.name}: {', '.join(row.name for row in rows)}")
    try:
        answer = json.loads(talk(line, json.dumps(job), log, environments.variables(peer)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        report.progress(f"!!! {server.name.upper()} FAILED: {error}; see {log}")
        return {}
    for name, timing in answer["rows"].items():
        if timing["error"]:
            report.progress(f"!!! {server.name} could not do {name}: {timing['error']}")
    return answer


def talk(line: list[str], job: str, log: Path, env: dict[str, str]) -> str:
    """Start a runner, give it its job, and return its answer when all that it started has ended.

    Servers with processes of their own leave some behind, and those would spin beside the next one:
    so a runner has a process group, which is ended with it.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(job, timeout=TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(SETTLE_S)
    return answer.strip().splitlines()[-1] if answer.strip() else ""


def short(row: dict[str, Any]) -> dict[str, Any]:
    """A warm-up's prompt needs no long prefix."""
    return {**row, "warm": [], "calls": [[prompt[-48:] for prompt in row["calls"][0]]]}


def rates(results: list[Timings], row: Row) -> list[float]:
    """A row's figure in each round: the median of the round's calls."""
    timings = (result.get("rows", {}).get(row.name) for result in results)
    return [
        row.rate(statistics.median(timing["seconds"]))
        for timing in timings
        if timing and timing["seconds"] and not timing["error"]
    ]


def tell(
    report: Report,
    rows: list[Row],
    results: dict[str, list[Timings]],
    gguf: Path,
    machine: floors.Machine,
) -> None:
    """Every server's figures: medians, rounds, floors, and whether prefixes were cached."""
    report.add("bandwidth_gb_s", machine.bandwidth / 1e9, unit="GB/s, reading")
    report.add("peak_gflop_s", machine.peak / 1e9, unit="GFLOP/s, float32")
    ours = next((result for result in results["ours"] if result), None)
    for name, rounds in results.items():
        versions = {result["version"] for result in rounds if result}
        report.add(f"{name}_version", ", ".join(sorted(versions)) or None)
    if ours:
        report.add("ours_kernels", ours["facts"]["kernels"])
    for row in rows:
        if ours:
            shape = floors.Shape.of(ours["facts"], gguf.stat().st_size)
            report.add(f"floor_{row.name}", row.floor(shape, machine), unit=row.unit)
        for name, rounds in results.items():
            figures = rates(rounds, row)
            if figures:
                report.add(f"{name}_{row.name}", statistics.median(figures), unit=row.unit)
                text = " ".join(f"{figure:.4g}" for figure in figures)
                report.add(f"{name}_{row.name}_rounds", text)
                if row.warm:
                    report.add(f"{name}_{row.name}_cached", cached(rounds, row))


def cached(results: list[Timings], row: Row) -> str:
    """How much of a warm prefix the server had: as it says, or by its own first token's time."""
    timings = [result["rows"][row.name] for result in results if row.name in result.get("rows", {})]
    told = [count for timing in timings for count in timing["cached"] if count is not None]
    if told:
        return f"{min(told)} tokens{'' if min(told) >= PREFIX else ' ONLY'}"
    first = [t for timing in timings for t in timing["first_token_s"] if t is not None]
    cold = [
        seconds
        for result in results
        if "prefill" in result.get("rows", {})
        for seconds in result["rows"]["prefill"]["seconds"]
    ]
    if not first or not cold:
        return "not told"
    ratio = statistics.median(first) / statistics.median(cold)
    return f"first token in {ratio:.2f} of the cold time"


def compare(report: Report, results: dict[str, list[Timings]], server: str, keys: Keys) -> None:
    """The ratios, a server of ours over theirs; None where either has no figure."""
    by_name = {row.name: row for row in ROWS}
    for key, (names, peer, bound) in keys.items():
        ratios = []
        for name in names:
            ours = rates(results[server], by_name[name])
            # of a peer's configurations the faster counts
            theirs = [
                statistics.median(figures)
                for other, rounds in results.items()
                if other.split("_")[0] == peer and (figures := rates(rounds, by_name[name]))
            ]
            if ours and theirs:
                ratios.append(statistics.median(ours) / max(theirs))
        report.add(key, min(ratios, default=None), at_least=bound)


if __name__ == "__main__":
    main()
