"""Start-up: load the model, size the pool, check the promise of same bits, wire the parts.

Owns the order of these steps and nothing afterwards.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch

from prefixcache.cache import BlockDigest, BlockManager, SwapSpace
from prefixcache.config import EngineConfig
from prefixcache.engine.cache_metrics import CacheMetrics
from prefixcache.engine.event_log import EventLog
from prefixcache.engine.model_runner import ModelRunner
from prefixcache.engine.requests import RequestBuilder
from prefixcache.engine.sampler import Sampler
from prefixcache.engine.scheduler import Scheduler
from prefixcache.engine.sizing import (
    DEFAULT_CPU_SHARE,
    cpu_memory_left,
    max_model_len,
    pool_blocks,
    swap_blocks,
)
from prefixcache.engine.swap_cost import SwapCost
from prefixcache.errors import ConfigurationError
from prefixcache.model.config import ModelConfig
from prefixcache.model.decode_graph import DecodeGraphs
from prefixcache.model.decoder import Decoder
from prefixcache.model.host_cache import HostCache
from prefixcache.model.kv_cache import FP8, KVCache, check_dtype
from prefixcache.model.loader import Checkpoint, load_checkpoint
from prefixcache.model.selftest import check_batch_invariance
from prefixcache.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What computes, and in which types: fields of `EngineConfig`, with every "auto" resolved."""

    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    activation_quantization: str | None


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    model_config: ModelConfig
    model_name: str
    tokenizer: Tokenizer
    max_model_len: int
    same_bits: bool
    arithmetic: Arithmetic
    manager: BlockManager
    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    requests: RequestBuilder
    event_log: EventLog
    cache_metrics: CacheMetrics
    bytes_per_block: int


def build_parts(
    config: EngineConfig, progress: Progress | None, clock: Callable[[], float]
) -> Parts:
    """Make the parts of an engine. Raises ModelError or ConfigurationError."""
    report = progress or (lambda step, done, total: None)
    device, dtype = _device_and_dtype(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    checkpoint = load_checkpoint(config.model, config.tokenizer, progress=progress)
    model = checkpoint.config
    report("lay out weights", 0, 1)
    wanted = config.max_model_len
    longest = wanted if isinstance(wanted, int) else model.max_position
    try:
        decoder = Decoder.from_checkpoint(
            checkpoint,
            device=device,
            dtype=dtype,
            max_model_len=min(longest, model.max_position),
            backend=config.attention_backend,
            batch_invariant=config.batch_invariant,
            activation_quantization=config.activation_quantization,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else dtype
    try:
        check_dtype(kv_dtype, decoder.kernels, device)
    except ValueError as error:
        raise ConfigurationError(f"kv_cache_dtype: {error}") from None
    per_block = KVCache.bytes_per_block(model, config.block_size, kv_dtype)
    host_blocks = swap_blocks(config, per_block, on_gpu=device.type == "cuda")
    num_blocks = pool_blocks(config, per_block, _available_bytes(config, decoder, kv_dtype))
    length = max_model_len(config, model.max_position, num_blocks, per_block)
    kv_cache = KVCache(
        model, num_blocks, config.block_size, kv_dtype, device, kernels=decoder.kernels
    )
    host_cache = HostCache(kv_cache, host_blocks) if host_blocks else None
    graphs = _capture(config, decoder, kv_cache, length, report)
    report("check same bits", 0, 1)
    same_bits = _same_bits(decoder, kv_dtype)
    manager = _manager(config, num_blocks, length, clock)
    event_log = EventLog(config.block_size, manager.trie.digest.seed_id)
    manager.observers.append(event_log)
    return Parts(
        model_config=model,
        model_name=checkpoint.name,
        tokenizer=checkpoint.tokenizer,
        max_model_len=length,
        same_bits=same_bits,
        arithmetic=Arithmetic(
            str(dtype).removeprefix("torch."),
            "fp8" if kv_dtype == FP8 else str(dtype).removeprefix("torch."),
            decoder.kernels.name,
            config.activation_quantization,
        ),
        manager=manager,
        scheduler=_scheduler(config, manager, host_cache, host_blocks),
        runner=ModelRunner(decoder, kv_cache, config.block_size, graphs, host_cache),
        sampler=Sampler(
            model.vocab_size,
            checkpoint.tokenizer.vocab_size,
            batched=decoder.kernels.name == "triton",  # in its interpreter too, to be tested there
        ),
        requests=RequestBuilder(
            config,
            checkpoint.tokenizer,
            fingerprint=_fingerprint(checkpoint, config),
            model=model,
            num_blocks=num_blocks,
            max_model_len=length,
        ),
        event_log=event_log,
        cache_metrics=CacheMetrics(
            manager, enabled=config.enable_prefix_caching, seed=secrets.randbits(64)
        ),
        bytes_per_block=per_block,
    )


def _scheduler(
    config: EngineConfig, manager: BlockManager, host_cache: HostCache | None, host_blocks: int
) -> Scheduler:
    """The scheduler; where there is memory on the host, one that estimates when to use it."""
    swap = cost = None
    if host_cache is not None:
        cost = SwapCost(config.block_size, host_cache.seconds_per_block())
        swap = SwapSpace(host_blocks, cost.worth_moving)
    scheduler = Scheduler(
        manager,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        wait_for_inflight=config.wait_for_inflight,
        swap=swap,
    )
    if cost is not None:
        scheduler.observers.add(cost)
    return scheduler


def _decodes_by_graph(config: EngineConfig, decoder: Decoder) -> bool:
    return decoder.kernels.name == "triton" and not config.enforce_eager


def _capture(
    config: EngineConfig, decoder: Decoder, kv_cache: KVCache, longest: int, report: Progress
) -> DecodeGraphs | None:
    """The graphs of decode steps, where the kernels can be captured."""
    if not _decodes_by_graph(config, decoder):
        return None
    return DecodeGraphs(
        decoder,
        kv_cache,
        max_rows=config.max_num_seqs,
        max_tokens=longest,
        progress=lambda done, total: report("capture graphs", done, total),
    )


def _fingerprint(checkpoint: Checkpoint, config: EngineConfig) -> bytes:
    """Of the namespaces: other arithmetic gives other keys and values for the same tokens."""
    return checkpoint.fingerprint + (config.activation_quantization or "").encode()


def _same_bits(decoder: Decoder, kv_dtype: torch.dtype) -> bool:
    """Whether results do not depend on the batch: where the kernels say so, it is tried out."""
    if not decoder.kernels.same_bits:
        return False
    failures = check_batch_invariance(decoder, dtype=kv_dtype).failures
    for failure in failures:
        logger.warning("no promise of the same bits: %s", failure)
    return not failures


def _manager(
    config: EngineConfig, num_blocks: int, longest: int, clock: Callable[[], float]
) -> BlockManager:
    """The pool; all pins together leave room for one sequence of the maximum length."""
    seed = secrets.randbits(64) if config.digest_seed is None else config.digest_seed
    reserve = -(-longest // config.block_size)
    return BlockManager(
        num_blocks,
        config.block_size,
        BlockDigest(seed),
        enable_caching=config.enable_prefix_caching,
        max_pinned_blocks=max(min(num_blocks // 2, num_blocks - reserve), 0),
        clock=clock,
    )


def _device_and_dtype(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device cuda was asked for, and torch sees none")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if name == "cuda" else "float32"
    return torch.device(name), _DTYPES[dtype]


def _available_bytes(config: EngineConfig, decoder: Decoder, kv_dtype: torch.dtype) -> int:
    """Memory for the pool, measured once the weights are in place; what graphs take is left out."""
    device = decoder.device
    if device.type == "cpu":
        return int(cpu_memory_left() * DEFAULT_CPU_SHARE)
    total = torch.cuda.mem_get_info(device)[1]
    check_batch_invariance(decoder, dtype=kv_dtype)  # a step at its peak
    peak = torch.cuda.max_memory_allocated(device)
    if _decodes_by_graph(config, decoder):
        peak += DecodeGraphs.bytes_needed(
            decoder,
            max_rows=config.max_num_seqs,
            max_tokens=decoder.max_model_len,
            block_size=config.block_size,
        )
    return int(total * config.gpu_memory_utilization) - peak
