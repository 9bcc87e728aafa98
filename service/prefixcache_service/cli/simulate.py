"""`prefixcache simulate`: replay a trace of requests; flags in, tables, plots and JSON out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from prefixcache.errors import ConfigurationError
from prefixcache_service.cli.config import ConfigFile, flag, parse_bytes
from prefixcache_service.cli.progress import progress

if TYPE_CHECKING:
    from prefixcache.model.config import ModelConfig
    from prefixcache.simulate.cost import ModelCost
    from prefixcache.simulate.study import Study


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1 or max(sizes) >= 2**31:
        raise typer.BadParameter(f"{text!r} is no list of pool sizes, such as 1000,4000")
    return sizes


def simulate(  # noqa: PLR0917 (each is a flag)
    trace: Annotated[Path, typer.Argument(help="Mooncake's, Azure's, or of `serve --record`.")],
    format: Annotated[
        Literal["auto", "mooncake", "azure", "prefixcache"], flag("What the file is.")
    ] = "auto",
    blocks: Annotated[
        Any, flag("Pool sizes, such as 1000,4000.", parser=_sizes, metavar="LIST")
    ] = None,
    block_size: Annotated[
        int | None, flag("Tokens in a block: a multiple of the trace's own.", min=1)
    ] = None,
    limit: Annotated[int | None, flag("Requests to read at most.", min=1)] = None,
    skip_bad: Annotated[bool, flag("Leave malformed lines out, and count them.")] = False,
    gpu_memory: Annotated[
        Any, flag("Memory to plan for, such as 80GiB.", parser=parse_bytes, metavar="BYTES")
    ] = None,
    model: Annotated[
        str | None, flag("config.json, its directory, or a .gguf file; no weights are read.")
    ] = None,
    bytes_per_token: Annotated[
        int | None, flag("KV of a token, instead of a model.", min=1)
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], flag("Of weights and cache.")
    ] = "bfloat16",
    gpu_memory_utilization: Annotated[
        float, flag("Share of the memory for weights and pool.", min=0.01, max=1)
    ] = 0.9,
    tflops: Annotated[float, flag("Peak arithmetic, TFLOP/s.", min=0.001)] = 989.0,
    bandwidth: Annotated[float, flag("Peak memory traffic, GB/s.", min=0.001)] = 3350.0,
    efficiency: Annotated[float, flag("Share of both that is reached.", min=0.01, max=1)] = 0.6,
    max_num_seqs: Annotated[int, flag("Sequences that run at once.", min=1)] = 256,
    max_num_batched_tokens: Annotated[int, flag("Token budget of a step.", min=1)] = 8192,
    png: Annotated[Path | None, flag("Draw the figures into this file.")] = None,
    html: Annotated[Path | None, flag("Write a report with figures into this file.")] = None,
    as_json: Annotated[
        bool, flag("Print JSON for programs.", "--json", envvar="PREFIXCACHE_JSON")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Replay a trace through the cache: hit rate by pool size, memory, and what a GPU would give.

    \b
      prefixcache simulate conversation_trace.jsonl --png curve.png
      prefixcache simulate trace.csv --block-size 32
      prefixcache simulate traffic.jsonl --gpu-memory 80GiB --model config.json --html plan.html
    """
    from prefixcache.simulate.cost import Hardware  # noqa: PLC0415 (clients need no simulator)
    from prefixcache.simulate.formats import read_trace  # noqa: PLC0415
    from prefixcache.simulate.study import as_json as plain  # noqa: PLC0415
    from prefixcache.simulate.study import study  # noqa: PLC0415

    if max_num_batched_tokens < max_num_seqs:
        raise typer.BadParameter("--max-num-batched-tokens must be at least --max-num-seqs")
    cost = _cost(model, bytes_per_token, dtype)
    if (gpu_memory is None) != (cost is None):
        raise typer.BadParameter("--gpu-memory goes with --model or --bytes-per-token")
    hardware = None
    if gpu_memory is not None:
        hardware = Hardware(gpu_memory, gpu_memory_utilization, tflops, bandwidth, efficiency)
    with progress() as report:
        read = read_trace(trace, format, limit=limit, skip_bad=skip_bad, progress=report)
        found = study(
            read,
            sizes=blocks or (),
            block_size=block_size,
            model=cost,
            hardware=hardware,
            max_num_seqs=max_num_seqs,
            token_budget=max_num_batched_tokens,
            progress=report,
        )
    _write(found, png, html)
    print(json.dumps(plain(found))) if as_json else _print(found)


def _cost(model: str | None, bytes_per_token: int | None, dtype: str) -> "ModelCost | None":
    from prefixcache.simulate.cost import ModelCost, cost_of  # noqa: PLC0415

    if model is not None and bytes_per_token is not None:
        raise typer.BadParameter("give --model or --bytes-per-token, not both")
    if model is not None:
        path = Path(model).absolute()
        name = path.parent.name if path.name == "config.json" else path.name
        return cost_of(_model_config(path), name, dtype)
    if bytes_per_token is not None:
        return ModelCost("unknown", bytes_per_token, 0, 0, 0)
    return None


def _model_config(path: Path) -> "ModelConfig":
    """A model's shape, from its configuration or header alone. Raises ModelError."""
    if path.suffix == ".gguf":
        from prefixcache.model.gguf_config import config_from_gguf  # noqa: PLC0415 (torch)
        from prefixcache.model.gguf_file import GgufFile  # noqa: PLC0415

        return config_from_gguf(GgufFile(path))
    from prefixcache.model.hf_config import (  # noqa: PLC0415
        config_from_directory,
        config_from_fields,
        read_json,
    )

    if path.is_dir():
        return config_from_directory(path)
    return config_from_fields(read_json(path), where=str(path))


def _write(found: "Study", png: Path | None, html: Path | None) -> None:
    from prefixcache.simulate import plots  # noqa: PLC0415

    try:
        if png is not None:
            png.write_bytes(plots.png(found))
        if html is not None:
            html.write_text(plots.page(found), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: cannot be written: {error.strerror}") from None


def _print(found: "Study") -> None:
    from prefixcache.simulate.plots import shown  # noqa: PLC0415
    from prefixcache.simulate.study import plan_figures  # noqa: PLC0415

    trace = found.trace
    console = Console(highlight=False)
    blocks = f", {found.distinct:,} distinct blocks of {trace.block_size}" if found.curve else ""
    skipped = f", {trace.skipped} malformed lines skipped" if trace.skipped else ""
    console.print(
        f"{trace.path}: {trace.format}, {len(trace.requests):,} requests{blocks}{skipped}"
    )
    if found.curve:
        rows = [
            (f"{p.blocks:,}", f"{p.lru:.1%}", f"{p.ours:.1%}", f"{p.bound:.1%}", f"{p.refused:,}")
            for p in found.curve
        ]
        head = "pool, blocks", "plain LRU", "prefixcache", "offline bound", "refused"
        console.print(_table("Blocks hit", head, rows))
    if found.schemes:
        lines = [
            (s.name, f"{s.unused_at_end:.1%}", f"{s.unused_running:.1%}", f"{s.batch:.2f} x")
            for s in found.schemes
        ]
        title = "Memory; Kwon et al. (SOSP 2023): 60-80 % unused, 2-4 x"
        head4 = "reserved", "unused at the end", "unused, running", "batch"
        console.print(_table(title, head4, lines))
    if found.plan is not None:
        figures = plan_figures(found.plan).items()
        pairs = [(name.replace("_", " "), shown(value)) for name, value in figures]
        console.print(_table("Plan", ("", ""), pairs))
    console.print("Assumptions:")
    for sentence in found.assumptions:
        console.print(f"  - {sentence}")


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table
