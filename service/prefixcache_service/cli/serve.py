"""`prefixcache serve`: flags to configurations, signals to the drain, one line when ready."""

import asyncio
import gc
import os
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from prefixcache.config import DEFAULT_MODEL, EngineConfig
from prefixcache.errors import ConfigurationError, PrefixCacheError
from prefixcache.limits import Limits
from prefixcache_service.cli.config import ConfigFile, flag, parse_bytes
from prefixcache_service.cli.progress import progress
from prefixcache_service.limits import DEFAULT_HOST, DEFAULT_HTTP_PORT, DEFAULT_PORT

if TYPE_CHECKING:
    from prefixcache.engine.engine import Engine
    from prefixcache_service.server import ServerConfig
    from prefixcache_service.tls import TlsFiles
    from prefixcache_service.tracing import Tracing


def _length(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number of tokens nor 'auto'") from None


_MODEL = "Model", "Cache", "Scheduling", "Network"

Model = Annotated[str, flag("smollm2, a directory of safetensors, a hub id, or a .gguf file.")]
Tokenizer = Annotated[
    str | None, flag("Directory, tokenizer.json or hub id; the model's own by default.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    flag("Of weights and cache; auto is float32 on the CPU, bfloat16 on CUDA."),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], flag("Where the model runs.")]
Backend = Annotated[
    Literal["auto", "triton", "cpu", "torch"], flag("Kernels; auto takes the fastest that works.")
]
Invariant = Annotated[
    bool,
    flag("On CUDA: the same bits however a request is served, at a cost; the CPU always does."),
]
Eager = Annotated[bool, flag("Replay no decode step from a captured graph (Triton's kernels).")]
Threads = Annotated[int | None, flag("CPU threads of the model.")]
Activations = Annotated[
    Literal["none", "int8"] | None,
    flag("Input of linear layers on Q8_0, Q4_0 and Q4_1 weights; int8 is faster (CPU only)."),
]
MaxModelLen = Annotated[
    Any,
    flag(
        "Longest sequence in tokens, or auto: what the pool holds. The model's own by default.",
        parser=_length,
        metavar="TOKENS",
    ),
]
Seed = Annotated[int | None, flag("Base of random streams of requests without a seed; else drawn.")]
BlockSize = Annotated[int, flag("Tokens in a block: 1, 2, 4 … 128.")]
KvDtype = Annotated[
    Literal["auto", "fp8"],
    flag("Of keys and values; auto is the model's. fp8 (e4m3) holds twice as much as bfloat16."),
]
Blocks = Annotated[int | None, flag("Size of the pool in blocks.")]
KvBytes = Annotated[
    Any,
    flag(
        "Memory of the pool on the CPU, such as 2GiB; a quarter of what is free by default.",
        parser=parse_bytes,
        metavar="BYTES",
    ),
]
SwapSpace = Annotated[
    float | None,
    flag("GiB of host memory for preempted requests' blocks; 4 on CUDA by default, 0 on the CPU."),
]
Utilization = Annotated[float, flag("Share of the GPU for weights, a peak step and the pool.")]
Caching = Annotated[bool, flag("Reuse the blocks of equal prefixes.")]
DigestSeed = Annotated[
    int | None, flag("Seed of the block digests; secret and drawn at start by default.")
]
MaxLeases = Annotated[int, flag("Kept sequences at once.")]
MaxKeep = Annotated[float, flag("Longest keep_seconds of a request.")]
MaxSeqs = Annotated[int, flag("Sequences that run at once.")]
MaxTokens = Annotated[int, flag("Token budget of a step.")]
MaxQueue = Annotated[int, flag("Requests that may wait; more are refused.")]
Wait = Annotated[bool, flag("Wait for prompt blocks that another request computes.")]
LimitSettings = Annotated[
    list[str] | None,
    flag(
        "Change a limit of requests, such as n=64 or open_calls=9000; repeatable. "
        "`--limit list` lists all.",
        "--limit",
        metavar="NAME=NUMBER",
    ),
]
Record = Annotated[
    Path | None,
    flag("Append lengths and keyed digests of requests, for `simulate`.", metavar="FILE"),
]
Host = Annotated[str, flag("Address for gRPC.")]
Port = Annotated[int, flag("Port for gRPC; 0 takes a free one.", min=0, max=65535)]
Http = Annotated[bool, flag("Serve the page, /metrics and /healthz.")]
HttpHost = Annotated[str, flag("Address for HTTP; by default only this machine can reach it.")]
HttpNames = Annotated[
    list[str] | None,
    flag(
        "Another name under which browsers may ask for the page; repeatable.",
        "--http-allowed-host",
        metavar="NAME",
    ),
]
ShowPrompts = Annotated[bool, flag("Show the text of cached prompts on the page.")]
HttpPort = Annotated[int, flag("Port for HTTP; 0 takes a free one.", min=0, max=65535)]
Grace = Annotated[float, flag("Seconds that running calls have to end after SIGTERM.", min=0)]
Keepalive = Annotated[
    float,
    flag("Seconds of silence before a client is asked whether it is there.", min=1, max=7200),
]
Tokens = Annotated[
    Path | None,
    flag("Let only tenants of this TOML file in; see `prefixcache token`.", metavar="FILE"),
]
TlsCert = Annotated[Path | None, flag("PEM file: certificate for both ports.", metavar="FILE")]
TlsKey = Annotated[Path | None, flag("PEM file: its key.", metavar="FILE")]
TlsClientCa = Annotated[
    Path | None,
    flag("PEM file: let only clients connect whose certificate this CA signed.", metavar="FILE"),
]
AllowInsecure = Annotated[
    bool, flag("Let other machines connect without TLS, or without tokens.", "--allow-insecure")
]
AdvertiseAddress = Annotated[
    str | None,
    flag(
        "Where clients reach this very server behind a load balancer; port 0: the one it has.",
        metavar="HOST:PORT",
    ),
]
MetricsCompat = Annotated[
    Literal["none", "vllm"], flag("Add the names of vLLM to /metrics, for its dashboards.")
]
MetricsTenants = Annotated[
    int, flag("Cache salts whose tokens are counted apart, by a digest of them; 0: none.")
]
TracesEndpoint = Annotated[
    str | None,
    flag(
        "Send traces to this OpenTelemetry collector, by OTLP over gRPC.",
        metavar="http://HOST:4317",
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], flag("Least level that is logged.")
]


def serve(  # noqa: PLR0917 (each is a flag)
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    tokenizer: Tokenizer = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention_backend: Backend = "auto",
    batch_invariant: Invariant = False,
    enforce_eager: Eager = False,
    activation_quantization: Activations = None,
    num_threads: Threads = None,
    max_model_len: MaxModelLen = None,
    seed: Seed = None,
    block_size: BlockSize = 16,
    kv_cache_dtype: KvDtype = "auto",
    num_gpu_blocks_override: Blocks = None,
    kv_cache_memory_bytes: KvBytes = None,
    swap_space: SwapSpace = None,
    gpu_memory_utilization: Utilization = 0.9,
    enable_prefix_caching: Caching = True,
    digest_seed: DigestSeed = None,
    max_leases: MaxLeases = 1024,
    max_keep_seconds: MaxKeep = 3600.0,
    max_num_seqs: MaxSeqs = 64,
    max_num_batched_tokens: MaxTokens = 512,
    max_queue: MaxQueue = 1024,
    wait_for_inflight: Wait = True,
    limit: LimitSettings = None,
    record: Record = None,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    http: Http = True,
    http_host: HttpHost = DEFAULT_HOST,
    http_port: HttpPort = DEFAULT_HTTP_PORT,
    http_allowed_host: HttpNames = None,
    show_prompts: ShowPrompts = False,
    tokens: Tokens = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    allow_insecure: AllowInsecure = False,
    advertise_address: AdvertiseAddress = None,
    grace: Grace = 10.0,
    keepalive: Keepalive = 20.0,
    metrics_compat: MetricsCompat = "none",
    metrics_tenants: MetricsTenants = 0,
    otlp_traces_endpoint: TracesEndpoint = None,
    log_level: LogLevel = "info",
    config: ConfigFile = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C. Prints one line when it is ready.

    Exit code 0 after a signal, 1 where it cannot start or the engine has died of a fault.

    \b
      prefixcache serve
      prefixcache serve --model Qwen/Qwen3-0.6B --max-model-len 8192 --port 50100
      PREFIXCACHE_PORT=50100 prefixcache serve --config server.toml
    """
    from prefixcache_service import log  # noqa: PLC0415
    from prefixcache_service.api import Access  # noqa: PLC0415
    from prefixcache_service.server import ServerConfig  # noqa: PLC0415 (clients need no server)

    engine_fields = EngineConfig.__dataclass_fields__
    engine = {name: value for name, value in context.params.items() if name in engine_fields}
    if activation_quantization == "none":
        engine["activation_quantization"] = None
    limits = _limits(limit or [])
    log.configure(log_level)
    access = Access(show_prompts, tuple(name.lower() for name in http_allowed_host or ()))
    http_on = http_port if http else None
    where = ServerConfig(
        host,
        port,
        http_host,
        http_on,
        grace,
        access,
        keepalive,
        metrics_compat,
        tokens,
        _tls_files(tls_cert, tls_key, tls_client_ca),
        allow_insecure,
        advertise_address,
        limits=limits,
    )
    _exit_at_once(
        asyncio.new_event_loop().run_until_complete(
            _serve(where, EngineConfig(**engine, limits=limits), otlp_traces_endpoint, record)
        )
    )


def _limits(settings: list[str]) -> Limits:
    if "list" in settings:
        for row in fields(Limits):
            typer.echo(f"{row.name:<17}{row.default:>9}  {row.metadata['what'].replace('`', '')}")
        raise typer.Exit
    return Limits.parse(settings)


def _tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> "TlsFiles | None":
    from prefixcache_service.tls import TlsFiles  # noqa: PLC0415 (clients need no server)

    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise typer.BadParameter("TLS needs both --tls-cert and --tls-key")
    return TlsFiles(cert, key, client_ca)


async def _serve(
    where: "ServerConfig", config: EngineConfig, traces: str | None, record: Path | None
) -> int:
    """Run a server; returns the exit code."""
    from prefixcache_service.server import Server  # noqa: PLC0415

    tracing = None if traces is None else _tracing(traces)
    recording = None if record is None else _open_record(record)
    server = Server(where)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop)
    await server.open()
    stopping = asyncio.create_task(stop.wait())
    with progress() as report:
        make = partial(_make_engine, config, report, tracing, recording)
        loading = asyncio.create_task(server.load(make))
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        try:
            engine = loading.result()
        except PrefixCacheError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    web = f", http://{where.http_host}:{server.http_port}" if server.http_port else ""
    print(
        f"prefixcache is ready: gRPC {where.host}:{server.port}{web}, model {engine.model_name}, "
        f"{engine.num_blocks} blocks of {config.block_size} tokens, "
        f"sequences up to {engine.max_model_len} tokens",
        flush=True,
    )
    down = asyncio.create_task(server.engine_down())
    await asyncio.wait({stopping, down}, return_when=asyncio.FIRST_COMPLETED)
    await server.drain()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    return 0 if stop.is_set() else 1  # a supervisor starts it anew


def _make_engine(
    config: EngineConfig, report: Any, tracing: "Tracing | None", recording: TextIO | None
) -> "Engine":
    from prefixcache.engine.engine import Engine  # noqa: PLC0415 (brings in torch)

    engine = Engine(config, progress=report)
    if tracing is not None:
        engine.observers.add(tracing)
    if recording is not None:
        _record(engine, recording)
    gc.freeze()  # the model stays for good: collections need not walk over it
    return engine


def _open_record(path: Path) -> TextIO:
    """Before the model is loaded, so that a wrong path is said at once."""
    from prefixcache.engine.recorder import open_record  # noqa: PLC0415 (brings in the engine)

    return open_record(path)


def _record(engine: "Engine", file: TextIO) -> None:
    from prefixcache.engine.recorder import Recorder  # noqa: PLC0415

    recorder = Recorder(file)
    recorder.begin(engine.config.block_size, engine.num_blocks)
    engine.observers.add(recorder)


def _tracing(endpoint: str) -> "Tracing":
    try:
        from prefixcache_service.tracing import Tracing, otlp_processor  # noqa: PLC0415 (an extra)
    except ImportError:
        raise ConfigurationError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'prefixcache[tracing]'"
        ) from None
    return Tracing(otlp_processor(endpoint))


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        _exit_at_once(1)  # asked twice: the second one does not wait
    stop.set()


def _exit_at_once(code: int) -> None:
    """Leave without waiting for threads: the engine's may be in the middle of a long step."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
