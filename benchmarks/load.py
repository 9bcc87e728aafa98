"""Latency against offered rate, through the real server; overload; and the same for a peer.

    python -m benchmarks.load --json [--peers vllm] [--plot docs/load.svg] [--seconds 60]

Open loop: sessions (see `_load_mix`) arrive as a Poisson process whether or not earlier ones have
ended, at one rate after the other, until a server no longer keeps up. Each server meets the same
sessions at the same times, and is alone on the machine. Then ours is offered several times what it
can do: what it cannot take is to be refused at once, and latency to be normal again soon after.
"""

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._load_mix import (
    OWN_TOKENS,
    Call,
    Refused,
    Session,
    Target,
    ids,
    run_session,
    sessions,
)
from benchmarks._load_targets import Ours, vllm
from benchmarks._report import Report
from benchmarks._server import serve
from benchmarks.peer_runners import environments
from prefixcache.model.default_model import pull_default_model
from prefixcache_service import AsyncClient

RATES = "0.25,0.5,0.75,1,1.5,2,3,4,6"
SLACK, SLACK_SECONDS = 0.1, 5.0  # how much longer than the arrivals the last session may take
WARM_UP_SECONDS = 6.0
PATIENCE_SECONDS = 120.0
OVERLOAD_FACTOR = 4.0
OVERLOADED_FLAGS = ("--max-queue", "16", "--max-num-seqs", "16")
RECOVERED = 1.5  # times the latency before the overload
PROBE_EVERY, PROBED_SECONDS = 0.5, 20.0
SERVER_FLAGS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "2048")
MEASURES: dict[str, tuple[Callable[[Call], float], str]] = {
    "ttft": (lambda call: call.first_token_s, "ms"),
    "token": (lambda call: call.token_s, "ms"),
    "whole": (lambda call: call.whole_s, "ms"),
}
TITLES = {"ttft": "first token", "token": "between tokens", "whole": "whole answer"}


@dataclass(frozen=True)
class Level:
    """What a server did at one offered rate, until all had ended.

    offered_seconds: how long sessions came. seconds: until the last had ended.
    stuck: sessions without an end.
    """

    rate: float
    calls: list[Call]
    stuck: int
    offered_seconds: float
    seconds: float

    @property
    def answered(self) -> list[Call]:
        return [call for call in self.calls if call.error is None and call.last]

    @property
    def sustained(self) -> bool:
        """Whether sessions ended as fast as they came, and none was refused or lost."""
        whole = len(self.answered) == len(self.calls) and not self.stuck
        return whole and self.seconds <= (1 + SLACK) * self.offered_seconds + SLACK_SECONDS

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return sum(call.tokens for call in self.answered) / self.seconds


def percentile(values: Sequence[float], percent: int) -> float:
    """Of at least one value; nan of none."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    report = Report(
        "load", "Latency against offered rate, overload, and a peer's server beside it."
    )
    report.parser.add_argument("--rates", default=RATES, help="sessions a second, ascending")
    report.parser.add_argument("--seconds", type=float, default=60.0, help="at each rate")
    report.parser.add_argument("--seed", type=int, default=1)
    report.parser.add_argument("--peers", default="vllm", help="vllm, or '' for ours alone")
    report.parser.add_argument("--plot", type=Path, help="draw latency against rate into this file")
    options = report.parse()
    seconds = min(options.seconds, 8.0) if options.quick else options.seconds
    plan = Plan(tuple(float(rate) for rate in options.rates.split(",")), seconds, options.seed)
    levels = {"ours": climb_ours(report, plan)}
    overload_ours(report, plan, highest(levels["ours"], plan.rates[0]))
    if options.peers:
        levels["vllm"] = climb_vllm(report, plan)
    compare(report, levels)
    if options.plot:
        plot(options.plot, levels)
    report.finish()


# ---------------------------------------------------------------- latency against rate


@dataclass(frozen=True)
class Plan:
    """Rates to offer, each for so many seconds; the seed decides what arrives and when."""

    rates: tuple[float, ...]
    seconds: float
    seed: int


def climb_ours(report: Report, plan: Plan) -> list[Level]:
    report.progress("starting ours")
    with serve(*SERVER_FLAGS) as address:

        async def work() -> list[Level]:
            async with AsyncClient(address) as client:
                return await climb(report, Ours(client), plan)

        return asyncio.run(work())


def climb_vllm(report: Report, plan: Plan) -> list[Level]:
    report.progress("starting vLLM's server")
    log = environments.peers_directory() / "vllm_server.log"
    try:
        with vllm(pull_default_model(), log) as target:
            return asyncio.run(climb(report, target, plan))
    except (OSError, RuntimeError) as error:
        report.progress(f"!!! VLLM IS NOT COMPARED: {error}")
        return []


async def climb(report: Report, target: Target, plan: Plan) -> list[Level]:
    """Offer one rate after the other until the server no longer keeps up."""
    await load(target, 1.0, WARM_UP_SECONDS, plan.seed + 1)
    levels: list[Level] = []
    for rate in plan.rates:
        level = await load(target, rate, plan.seconds, plan.seed)
        levels.append(level)
        tell(report, target.name, level)
        if not level.sustained:
            break
    return levels


async def load(target: Target, rate: float, seconds: float, seed: int) -> Level:
    """Offer this rate for so long, and wait for all that has begun to end."""
    calls: list[Call] = []
    clock = asyncio.get_running_loop().time
    began = clock()
    running = await arrive(target, sessions(rate, seconds, seed), calls)
    _, stuck = await asyncio.wait(running, timeout=PATIENCE_SECONDS) if running else (set(), set())
    took = max(clock() - began, seconds)
    for task in stuck:
        task.cancel()
    return Level(rate, calls, len(stuck), seconds, took)


async def arrive(
    target: Target, arrivals: Sequence[Session], calls: list[Call]
) -> list["asyncio.Task[None]"]:
    """Start each session at its moment, whatever has become of the others."""
    clock = asyncio.get_running_loop().time
    began = clock()
    running = []
    for session in arrivals:
        await asyncio.sleep(max(began + session.at - clock(), 0))
        running.append(asyncio.create_task(run_session(session, target, calls)))
    return running


def tell(report: Report, name: str, level: Level) -> None:
    key = f"{name}_at_{level.rate:g}"
    for what, (measure, unit) in MEASURES.items():
        for percent in (50, 90, 99):
            value = percentile([measure(call) for call in level.answered], percent)
            report.add(f"{key}_{what}_p{percent}", value * 1e3, unit=unit)
    report.add(f"{key}_throughput", level.throughput, unit="output tokens/s")
    report.add(f"{key}_longest_wait_s", max(c.first_token_s for c in level.answered), unit="s")
    report.add(f"{key}_sustained", level.sustained)


def highest(levels: list[Level], otherwise: float) -> float:
    """The highest sustained rate."""
    return max((level.rate for level in levels if level.sustained), default=otherwise)


def compare(report: Report, levels: dict[str, list[Level]]) -> None:
    """Ours and the peer's at the highest rate that both sustain; above 1 is better for us."""
    ours, theirs = (
        {level.rate: level for level in levels.get(name, []) if level.sustained}
        for name in ("ours", "vllm")
    )
    report.add("highest_rate", max(ours, default=None), unit="sessions/s, ours")
    report.add("vllm_highest_rate", max(theirs, default=None), unit="sessions/s")
    both = ours.keys() & theirs.keys()
    if not both:
        report.add("p99_ttft_vs_vllm", None)
        report.add("throughput_vs_vllm", None)
        return
    rate = max(both)
    waits = [
        percentile([call.first_token_s for call in level.answered], 99)
        for level in (theirs[rate], ours[rate])
    ]
    report.add("compared_at_rate", rate, unit="sessions/s: the highest that both sustain")
    report.add("p99_ttft_vs_vllm", waits[0] / waits[1], at_least=1.0)
    report.add("throughput_vs_vllm", ours[rate].throughput / theirs[rate].throughput, at_least=0.95)
    report.add("highest_rate_vs_vllm", max(ours) / max(theirs), at_least=1.0)


# ---------------------------------------------------------------- overload


def overload_ours(report: Report, plan: Plan, sustained: float) -> None:
    """Several times what it can do, with a short queue."""
    rate = OVERLOAD_FACTOR * sustained
    report.progress(f"overload: {rate:g} sessions/s")
    with serve(*SERVER_FLAGS, *OVERLOADED_FLAGS) as address:

        async def work() -> None:
            async with AsyncClient(address) as client:
                await overload(report, Ours(client), plan, rate)

        asyncio.run(work())


async def overload(report: Report, target: Target, plan: Plan, rate: float) -> None:
    """Probes before and after show what latency is normal, and when it is again."""
    draw = random.Random(plan.seed)
    await probe(target, draw, WARM_UP_SECONDS)
    before = await probe(target, draw, WARM_UP_SECONDS)
    normal = percentile([wait for _, wait in before], 90)
    calls: list[Call] = []
    running = await arrive(target, sessions(rate, plan.seconds / 2, plan.seed), calls)
    after = await probe(target, draw, PROBED_SECONDS)
    if running:
        await asyncio.wait(running, timeout=PATIENCE_SECONDS)
    slow = [at for at, wait in after if not wait <= RECOVERED * normal]
    answered = [call for call in calls if call.error is None and call.last]
    refused = Counter(call.error for call in calls if call.error)
    report.add("overload_offered", rate, unit="sessions/s")
    report.add("overload_answered", len(answered))
    report.add("overload_refused", refused["ResourceExhausted"], at_least=1)
    report.add(
        "overload_lost", len(calls) - len(answered) - refused["ResourceExhausted"], at_most=0
    )
    report.add("overload_longest_wait_s", max(call.first_token_s for call in answered), unit="s")
    report.add("normal_ttft_p90", normal * 1e3, unit="ms")
    report.add("recovery_s", max(slow, default=0.0) + PROBE_EVERY, unit="s", at_most=10)


async def probe(target: Target, draw: random.Random, seconds: float) -> list[tuple[float, float]]:
    """Short calls, evenly spaced: when each was made, and how long its first token took.

    A call that is refused took for ever.
    """
    clock = asyncio.get_running_loop().time
    began = clock()

    async def one(at: float) -> tuple[float, float]:
        await asyncio.sleep(at)
        call = Call("probe", clock())
        try:
            await target.generate(ids(draw, OWN_TOKENS), 4, call)
        except Refused:
            return call.sent - began, float("inf")
        return call.sent - began, call.first_token_s

    moments = [number * PROBE_EVERY for number in range(int(seconds / PROBE_EVERY))]
    return list(await asyncio.gather(*map(one, moments)))


# ---------------------------------------------------------------- the picture


def plot(path: Path, levels: dict[str, list[Level]]) -> None:
    """Latency against offered rate; needs `prefixcache[plots]`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (what, (measure, unit)) in zip(
        figure.subplots(1, len(MEASURES)), MEASURES.items(), strict=True
    ):
        for colour, (name, climbed) in enumerate(levels.items()):
            for percent, style in ((50, "-"), (99, "--")):
                values = [
                    percentile([measure(call) for call in level.answered], percent) * 1e3
                    for level in climbed
                ]
                rates = [level.rate for level in climbed]
                label = f"{name}, p{percent}"
                axes.plot(rates, values, style, color=f"C{colour}", marker=".", label=label)
        axes.set(title=TITLES[what], xlabel="sessions offered a second", ylabel=unit, yscale="log")
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
