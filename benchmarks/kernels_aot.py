"""What each Triton kernel takes of each GPU, compiled here without one.

    python -m benchmarks.kernels_aot [--json] [--quick] [--target sm_90]
    python -m benchmarks.kernels_aot --write docs/performance.md

Prints a markdown table: registers of a thread, spilled bytes (none is the rule), and shared memory
against the target's limit. Shapes are those of a model of Llama-3.1-8B's shape (32 heads over 8).
With --write, a table of one line a kernel goes into a page, between its two marks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from benchmarks._report import Report
from prefixcache_kernels import Cache, Heads, QuantizedCache
from prefixcache_kernels.triton_backend import copy_blocks, linear, paged_attention, rows, write_kv
from prefixcache_kernels.triton_backend.aot import TARGETS, Compiled, Target, compile_launch
from prefixcache_kernels.triton_backend.launch import Launch

BLOCK_SIZE = 16
BLOCKS = 4096
SPAN = 1024
TOKENS = 256
HIDDEN = 4096
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One kernel for one target, element type and head size."""

    kernel: str
    target: Target
    dtype: str
    dim: int
    window: int | None = None
    fp8: bool = False
    """Keys and values in e4m3 with scales."""

    @property
    def name(self) -> str:
        window = "" if self.window is None else f" window {self.window}"
        return f"{self.kernel} {self.types} D={self.dim}{window} {self.target.name}"

    @property
    def types(self) -> str:
        return f"{self.dtype}, fp8 KV" if self.fp8 else self.dtype

    def compile(self) -> Compiled:
        return compile_launch(LAUNCHES[self.kernel](self), self.target)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _floats(case: Case, *shape: int) -> Tensor:
    return _meta(*shape, dtype=DTYPES[case.dtype])


def _ints(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _heads(case: Case) -> Heads:
    return Heads(32, 8, case.dim)


def _caches(case: Case) -> tuple[Cache, Cache]:
    dtype = torch.float8_e4m3fn if case.fp8 else DTYPES[case.dtype]
    keys = _meta(BLOCKS, 8, case.dim, BLOCK_SIZE, dtype=dtype)
    values = _meta(BLOCKS, 8, BLOCK_SIZE, case.dim, dtype=dtype)
    if not case.fp8:
        return keys, values
    scales = _meta(BLOCKS, 8, BLOCK_SIZE, dtype=torch.float32)
    return QuantizedCache(keys, scales), QuantizedCache(values, scales)


def _attention(case: Case) -> tuple[Launch, Launch]:
    heads = _heads(case)
    q = _floats(case, TOKENS, heads.query * heads.dim)
    work = [_ints(64, 4), _ints(512), _ints(512), _ints(64), _ints(64), _ints(TOKENS, 3)]
    values = _meta(512, heads.query, heads.dim, dtype=torch.float32)
    sums = _meta(512, heads.query, dtype=torch.float32)
    buffers = paged_attention.AttentionBuffers(_ints(2), *work, values, sums, sums)
    table = _ints(64, 4096)
    step = paged_attention.AttentionInput(
        heads, _ints(TOKENS), table, SPAN, case.window, BLOCKS - 1, buffers
    )
    tile = paged_attention.tile_of(heads, DTYPES[case.dtype], case.target.shared_kib, case.fp8)
    return paged_attention.attention_launches(q, *_caches(case), q, step, tile)


def _linear(case: Case) -> Launch:
    tile = linear.tile_of(HIDDEN, DTYPES[case.dtype], case.target.shared_kib)
    x, weight = _floats(case, TOKENS, HIDDEN), _floats(case, HIDDEN, HIDDEN)
    return linear.linear_launch(x, weight, None, x, tile)


def _norm(case: Case) -> Launch:
    x = _floats(case, TOKENS, HIDDEN)
    return rows.norm_launch(x, x, _floats(case, HIDDEN), x, 1e-5)


def _silu(case: Case) -> Launch:
    return rows.silu_launch(_floats(case, TOKENS, 28672), _floats(case, TOKENS, 14336))


def _rope(case: Case) -> Launch:
    heads = _heads(case)
    qkv = _floats(case, TOKENS, (heads.query + 2 * heads.kv) * heads.dim)
    q = _floats(case, TOKENS, heads.query * heads.dim)
    angles, weight = _meta(8192, heads.dim, dtype=torch.float32), _floats(case, heads.dim)
    slots = _meta(TOKENS, dtype=torch.int64)
    norms = (weight, weight, 1e-6)
    return write_kv.rope_launch(qkv, q, *_caches(case), _ints(TOKENS), slots, angles, heads, norms)


def _write(case: Case) -> Launch:
    rows_ = _floats(case, TOKENS, 8 * case.dim)
    return write_kv.write_launch(rows_, rows_, *_caches(case), _meta(TOKENS, dtype=torch.int64))


def _copy(case: Case) -> Launch:
    dtype = torch.uint8 if case.fp8 else DTYPES[case.dtype]
    cache = _meta(32, BLOCKS, 8, case.dim, BLOCK_SIZE, dtype=dtype)
    return copy_blocks.copy_launch(cache, cache, _meta(8, 2, dtype=torch.int64))


LAUNCHES: dict[str, Callable[[Case], Launch]] = {
    "paged_attention": lambda case: _attention(case)[0],
    "merge_spans": lambda case: _attention(case)[1],
    "linear": _linear,
    "rope_write_kv": _rope,
    "write_kv": _write,
    "copy_blocks": _copy,
    "add_rms_norm": _norm,
    "silu_mul": _silu,
}


def cases(targets: list[Target]) -> Iterator[Case]:
    """Every kernel for every target, bf16 and fp16, D 64 and 128; attention at other sizes too."""
    for target in targets:
        for dtype in ("bf16", "fp16"):
            for dim in (64, 128):
                for kernel in LAUNCHES:
                    yield Case(kernel, target, dtype, dim)
        for dim in (80, 96, 112, 192, 256):
            yield Case("paged_attention", target, "bf16", dim)
        yield Case("paged_attention", target, "bf16", 128, window=4096)
        for dim in (64, 128, 256):
            yield Case("paged_attention", target, "fp32", dim)
        yield Case("linear", target, "fp32", 128)
        for dim in (64, 128, 256) if target.name != "sm_80" else ():  # which has no e4m3
            for kernel in ("paged_attention", "rope_write_kv", "write_kv", "copy_blocks"):
                yield Case(kernel, target, "bf16", dim, fp8=True)
        if target.name != "sm_80":
            yield Case("paged_attention", target, "fp16", 128, fp8=True)


def quick_cases() -> list[Case]:
    """The four that `make test` compiles: attention as each target has it."""
    return [
        Case("paged_attention", TARGETS["sm_80"], "fp16", 64),
        Case("paged_attention", TARGETS["sm_90"], "bf16", 128),
        Case("paged_attention", TARGETS["sm_100"], "bf16", 64),
        Case("paged_attention", TARGETS["gfx942"], "fp16", 128),
    ]


BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"
COLUMNS = ("kernel", "target", "type", "D", "registers", "spilled bytes", "shared KiB", "limit KiB")


def row(case: Case, made: Compiled) -> tuple[str | int | float, ...]:
    """The cells of one line of the table."""
    size = f"{case.dim}" + (f", window {case.window}" if case.window else "")
    usage = (made.registers, made.spills, round(made.shared / 1024, 1), case.target.shared_kib)
    return case.kernel, case.target.name, case.types, size, *usage


def summary(found: Sequence[tuple[Case, Compiled]]) -> str:
    """A line for each kernel and types, a column for each target: the most over all shapes."""
    targets = list(dict.fromkeys(case.target for case, _ in found))
    heads = [f"{target.name} (≤ {target.shared_kib} KiB)" for target in targets]
    lines = [
        f"Compiled by Triton {triton.__version__}: registers a thread, KiB of shared memory, and "
        "bytes spilled where there are any; the most over head sizes 64 to 256.",
        "",
        "| kernel | types | " + " | ".join(heads) + " |",
        "|---|---" + "|---:" * len(targets) + "|",
    ]
    for kernel, types in sorted({(case.kernel, case.types) for case, _ in found}):
        cells = []
        for target in targets:
            all_of = [
                made
                for case, made in found
                if (case.kernel, case.types, case.target) == (kernel, types, target)
            ]
            cells.append(_most(all_of) if all_of else "-")
        lines.append(f"| {kernel} | {types} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _most(made: Sequence[Compiled]) -> str:
    spills = max(one.spills for one in made)
    text = f"{max(one.registers for one in made)} / {max(one.shared for one in made) / 1024:.1f}"
    return text + (f", **{spills} B spilled**" if spills else "")


def write(page: Path, table: str) -> None:
    """Put the table between the marks of a page. Raises ValueError where they are missing."""
    before, mark, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{page}: has no {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def main() -> None:
    report = Report("kernels_aot", "Registers, spills and shared memory of each Triton kernel.")
    report.parser.add_argument("--target", choices=TARGETS, action="append")
    report.parser.add_argument("--write", type=Path, help="a page with the marks of the table")
    options = report.parse()
    targets = [TARGETS[name] for name in options.target or TARGETS]
    chosen = quick_cases() if options.quick else list(cases(targets))
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---|---|---|---" + "|---:" * 4 + "|")
    spilled = spilled_float32 = over = 0
    found: list[tuple[Case, Compiled]] = []
    for case in chosen:
        made = case.compile()
        cells = row(case, made)
        found.append((case, made))
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        spilled += made.spills > 0 and case.dtype != "fp32"
        spilled_float32 += made.spills > 0 and case.dtype == "fp32"
        over += made.shared > case.target.shared_kib * 1024
        report.add(case.name, f"{made.registers} registers, {cells[6]} KiB shared")
    report.add("compiled", len(chosen))
    report.add("kernels_with_spills", spilled, at_most=0)
    report.add("float32_kernels_with_spills", spilled_float32)  # for correctness, not for speed
    report.add("kernels_over_shared", over, at_most=0)
    if options.write:
        write(options.write, summary(found))
    report.finish()


if __name__ == "__main__":
    main()
