"""A long soak, and what it saw.

    python -m tests.soak --seconds 1800 --seed 1 --json

Exit code 1 where anything was lost.
"""

import sys
from pathlib import Path

from benchmarks._report import Report
from tests.soak.run import Result, run, temporary_directory

MEBI = 2**20


def main() -> None:
    report = Report("soak", "Everything at once, at random, against a server with a tiny pool.")
    report.parser.add_argument("--seconds", type=float, default=1800.0)
    report.parser.add_argument("--seed", type=int, default=1)
    report.parser.add_argument("--keep", type=Path, help="put the server's log into this directory")
    options = report.parse()
    report.progress(f"{options.seconds:g} seconds from seed {options.seed}")
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        result = run(options.seconds, options.seed, options.keep)
    else:
        with temporary_directory() as directory:
            result = run(options.seconds, options.seed, directory)
    tell(report, result)
    report.finish()
    for problem in result.problems[:20]:
        report.progress(f"!!! {problem}")
    sys.exit(1 if result.problems else 0)


def tell(report: Report, result: Result) -> None:
    counts = result.counts
    report.add("requests_served", counts.get("served", 0))
    report.add("answers_compared", counts.get("answers compared", 0))
    report.add("bad_inputs", counts.get("bad inputs", 0))
    report.add("faults_injected", result.server["faults"])
    for name in ("cancelled", "disconnected", "clients killed"):
        report.add(name.replace(" ", "_"), counts.get(name, 0))
    for name, value in sorted(counts.items()):
        if name.startswith(("refused", "failed")):
            report.add(name.replace(": ", "_").replace(" ", "_").lower(), value)
    for name, value in result.stats.items():
        report.add(name, value)
    report.add("steps_checked", result.server["steps_checked"])
    growth, noise = result.growth
    report.add("memory_mib", result.later[-1][1] / MEBI, unit="MiB")
    report.add("memory_growth_mib", growth / MEBI, unit="MiB over the last two thirds")
    report.add("memory_noise_mib", noise / MEBI, unit="MiB, standard deviation about the line")
    report.add("lost", len(result.problems), at_most=0)


if __name__ == "__main__":
    main()
