"""`make gpu-check`: everything about the Triton kernels that only a GPU can show, in one run.

    python -m benchmarks.gpu_check [--device cuda|cpu] [--json] [--quick]

1. Kernel tests on the device (`tests/kernels/triton_cases`), several processes at once.
2. Same bits with `batch_invariant`: alone and batched, in chunks, forked, prefilled and decoded,
   launched and captured; then the engine's own tokens and logprobs, where its packages are there:
   graphs on and off, swapped, in fp8, and on the default model too if its file is there.
3. Attention: percent of copy bandwidth, shared against unshared, trees, bytes against the least.
4. Linear layers with batch invariance against the device's library.
5. Steps of a model of Llama-3.1-8B's shape with random weights, launched and captured: host time,
   cost of invariance.

Needs no network and no checkpoint; torch, Triton, numpy, pytest and hypothesis. Without a GPU
(`--device cpu`) the same code runs at toy sizes in Triton's interpreter, and proves no figure.
A part that fails is reported and the others still run; the exit code tells.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks._report import Report

_ROOT = Path(__file__).parents[2]
_CASES = "tests/kernels/triton_cases"
_SECONDS = 460
"""All of it ends within this; what has not begun by then is left out and reported."""


def main() -> int:
    report = Report("gpu_check", "What only a GPU can show of the Triton kernels.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    report.parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    report.parser.add_argument("--skip-tests", action="store_true", help="benchmarks alone")
    options = report.parse()
    _interpret(options.device == "cpu")
    # Imported when it is settled whether kernels are interpreted.
    from benchmarks.gpu_check.attention import attention  # noqa: PLC0415
    from benchmarks.gpu_check.bits import same_bits  # noqa: PLC0415
    from benchmarks.gpu_check.device import Target  # noqa: PLC0415
    from benchmarks.gpu_check.engine import engine  # noqa: PLC0415
    from benchmarks.gpu_check.steps import linears, steps  # noqa: PLC0415

    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    target = Target(torch.device(options.device), dtype)
    report.add("device", target.name)
    began = time.monotonic()
    parts: dict[str, Callable[[], None]] = {
        "same_bits": lambda: same_bits(report, target),
        "engine": lambda: engine(report, target),
        "kernel_tests": lambda: kernel_tests(report, target.toy),
        "attention": lambda: attention(report, target),
        "linears": lambda: linears(report, target),
        "steps": lambda: steps(report, target),
    }
    if options.skip_tests:
        del parts["kernel_tests"]
    failed = []
    for name, part in parts.items():
        report.progress(f"{name}, at {time.monotonic() - began:.0f} s")
        if time.monotonic() - began > _SECONDS * 0.85:
            failed.append(f"{name}: no time left")
            continue
        try:
            part()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        if not target.toy:
            torch.cuda.empty_cache()
    report.add("seconds", time.monotonic() - began, at_most=480.0)
    report.add("failed", ", ".join(failed) or "none")
    report.finish()
    return 1 if failed or report.missed else 0


def _interpret(wanted: bool) -> None:
    """Start anew where the environment says otherwise: Triton reads it when it is imported."""
    if (os.environ.get("TRITON_INTERPRET", "0") == "1") != wanted:
        environment = {**os.environ, "TRITON_INTERPRET": "1" if wanted else "0"}
        command = [sys.executable, "-m", "benchmarks.gpu_check", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)


def kernel_tests(report: Report, toy: bool) -> None:
    """Run the cases in several processes: on a GPU most of their time is compiling."""
    cases = _collect()
    processes = 2 if toy else max(2, min(8, len(os.sched_getaffinity(0)) - 2))
    running = [
        subprocess.Popen(
            [*_PYTEST, "--maxfail=3", *cases[shard::processes]],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for shard in range(processes)
    ]
    wrong = []
    deadline = time.monotonic() + _SECONDS / 2
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\nout of time"
        if process.returncode:
            wrong.append(output[-6_000:])
    report.add("kernel_tests", len(cases), unit="cases")
    report.add("kernel_test_processes_failed", len(wrong), at_most=0)
    if wrong:
        raise AssertionError("\n".join(wrong))


_PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
_PYTEST += ["-o", "addopts=", "-q"]


def _collect() -> list[str]:
    command = [*_PYTEST, "--collect-only", _CASES]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    cases = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not cases:
        raise AssertionError(f"no cases: {done.stdout[-3_000:]}{done.stderr[-3_000:]}")
    return cases


if __name__ == "__main__":
    sys.exit(main())
