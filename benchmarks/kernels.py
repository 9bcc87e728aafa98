"""Attention on the CPU: shared prefixes against unshared ones, and what planning costs.

    python -m benchmarks.kernels --json [--plot docs/decode_cost.svg]

Heads of SmolLM2 (9 query, 3 KV, of 64), float32, blocks of 16. torch's scaled_dot_product_attention
over contiguous copies of the same K and V is timed in turn with ours, each KV head read once for
its query heads. Its time does not count making the copies.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks._report import Report, compare, median_seconds
from benchmarks.decode_cost import decode_cost, write_chart
from prefixcache.model.attention import StepInput, plan_step
from prefixcache_kernels import select_kernels
from prefixcache_kernels.backend import Heads

BLOCK = 16
HEADS = Heads(query=9, kv=3, dim=64)


@dataclass
class Case:
    """A decode step of `tables` (block ids, one list a sequence), one query row a sequence."""

    step: StepInput
    q: torch.Tensor  # [S, query heads · dim]
    keys: torch.Tensor  # [blocks, kv heads, dim, block]
    values: torch.Tensor  # [blocks, kv heads, block, dim]


def case(tables: Sequence[Sequence[int]], length: int) -> Case:
    """Sequences of `length` tokens over the given blocks."""
    generator = torch.Generator().manual_seed(0)
    blocks = 1 + max(max(table) for table in tables)
    shape = (blocks, HEADS.kv, HEADS.dim, BLOCK)
    count = len(tables)
    return Case(
        case_step(tables, length),
        torch.randn(count, HEADS.query * HEADS.dim, generator=generator),
        torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator).transpose(2, 3).contiguous(),
    )


def ours(work: Case) -> Callable[[], torch.Tensor]:
    """Our attention of one layer; the plan of the step is made beforehand."""
    kernels = select_kernels("auto", torch.device("cpu"), torch.float32)
    planned = plan_step(work.step, BLOCK, [None], kernels.run_rows)
    plan = kernels.prepare(planned, HEADS, torch.zeros(2, HEADS.dim))
    return lambda: kernels.paged_attention(work.q, work.keys, work.values, plan, None)


def sdpa(work: Case) -> Callable[[], torch.Tensor]:
    """torch's, over contiguous K and V of each sequence, [S, kv heads, L, dim]."""
    length = int(work.step.seq_lens[0])
    group = HEADS.query // HEADS.kv
    table = torch.from_numpy(work.step.block_table).long()
    keys = work.keys[table].permute(0, 2, 1, 4, 3).flatten(2, 3)[:, :, :length]
    values = work.values[table].permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :length]
    keys, values = keys.contiguous(), values.contiguous()
    q = work.q.view(-1, HEADS.kv, group, HEADS.dim)  # a KV head's query heads as its rows
    return lambda: F.scaled_dot_product_attention(q, keys, values)


def attention(report: Report, rounds: int) -> None:
    """32 queries over 1,024 tokens, shared by all, and each with its own."""
    blocks = 1_024 // BLOCK
    shared = case([list(range(blocks))] * 32, 1_024)
    own = case([list(range(i * blocks, (i + 1) * blocks)) for i in range(32)], 1_024)
    for name, work, bound in (("shared", shared, 4.0), ("unshared", own, 0.9)):
        mine, theirs = ours(work), sdpa(work)
        difference = (mine().view(32, -1) - theirs().reshape(32, -1)).abs().max().item()
        assert difference < 1e-4, difference
        pair = compare(theirs, mine, rounds=rounds, warm_up=3, inner=5)
        report.add(f"{name}_us", pair.second * 1e6, unit="µs a layer")
        report.add(f"{name}_vs_sdpa", pair.ratio, at_least=bound)


def planning(report: Report, rounds: int) -> None:
    """Host time of a step's plan, at 256 sequences: one shared prompt, none shared, one beam."""
    blocks = 1_024 // BLOCK
    flat = [[*range(blocks), blocks + i] for i in range(256)]
    unshared = [list(range(i * (blocks + 1), (i + 1) * (blocks + 1))) for i in range(256)]
    forks = range(8, -1, -1)  # the last nine blocks are a binary tree of beams
    beam = [[*range(blocks - 8), *(1_000 + 10 * (i >> s) + s for s in forks)] for i in range(256)]
    kernels = select_kernels("auto", torch.device("cpu"), torch.float32)
    table = torch.zeros(2, HEADS.dim)
    worst = 0.0
    for name, tables in (("flat", flat), ("unshared", unshared), ("beam", beam)):
        step = case_step(tables, blocks * BLOCK + 5)

        def plan(step: StepInput = step) -> object:
            return kernels.prepare(plan_step(step, BLOCK, [None], kernels.run_rows), HEADS, table)

        seconds = median_seconds(plan, rounds=rounds)
        report.add(f"plan_{name}_us", seconds * 1e6, unit="µs")
        worst = max(worst, seconds)
    report.add("plan_us_256", worst * 1e6, unit="µs, the worst of the three", at_most=1_000)


def case_step(tables: Sequence[Sequence[int]], length: int) -> StepInput:
    """The step alone: planning reads no K or V."""
    count = len(tables)
    return StepInput(
        token_ids=np.zeros(count, np.int32),
        positions=np.full(count, length - 1, np.int32),
        slot_mapping=np.full(count, -1, np.int64),
        query_start_loc=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.full(count, length, np.int32),
        block_table=np.array(tables, np.int32),
        logits_rows=np.arange(count, dtype=np.int32),
    )


def plan_overhead(report: Report, rounds: int) -> None:
    """With nothing to share: time in planning by step time, 16 sequences of the default model."""
    import prefixcache.model.decoder as decoder_module  # noqa: PLC0415
    from prefixcache import Engine, EngineConfig, SamplingParams  # noqa: PLC0415

    engine = Engine(EngineConfig(num_gpu_blocks_override=1_024, max_model_len=2_048))
    inside = 0.0
    plan = decoder_module.plan_step

    def timed(*arguments: object, **named: object) -> object:
        nonlocal inside
        start = time.perf_counter()
        result = plan(*arguments, **named)  # type: ignore[arg-type]
        inside += time.perf_counter() - start
        return result

    decoder_module.plan_step = timed  # type: ignore[assignment]
    random = np.random.default_rng(0)
    shares = []
    for _ in range(rounds):
        prompts = [random.integers(100, 40_000, 512).tolist() for _ in range(16)]
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
        inside, start = 0.0, time.perf_counter()
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        shares.append(inside / (time.perf_counter() - start))
    report.add("plan_overhead", float(np.median(shares)), at_most=0.02)


def main() -> None:
    report = Report("kernels", "Attention and planning on the CPU.")
    report.parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="time whole steps by batch and context too"
    )
    options = report.parse()
    rounds = 11 if options.quick else 51
    attention(report, rounds)
    planning(report, rounds)
    plan_overhead(report, 1 if options.quick else 5)
    if options.plot is not None:
        costs = decode_cost(report, 1 if options.quick else 3)
        write_chart(costs, options.plot)
    report.finish()


if __name__ == "__main__":
    main()
