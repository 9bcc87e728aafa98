"""The engine's configuration: frozen, validated once, when it is made."""

from dataclasses import dataclass, field

from prefixcache.errors import ConfigurationError
from prefixcache.limits import Limits

DEFAULT_MODEL = "smollm2"

_MOST = 2**31 - 1
"""Block ids have 32 bits, and so have counts on the wire."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that is fixed while an engine lives. Flags of `prefixcache serve` map to fields.

    model: "smollm2" (the default model), a safetensors directory, a hub id, or a .gguf file.
    dtype: "auto" (float32 on the CPU, bfloat16 on CUDA), "float32", "bfloat16" or "float16".
    device: "auto", "cpu" or "cuda".
    max_model_len: longest sequence in tokens; None is the model's own length; "auto" is the
        longest that the pool holds.
    block_size: tokens in a KV block, a power of two from 1 to 128.
    kv_cache_dtype: "auto" (the model's dtype) or "fp8": keys and values in e4m3 with a scale for
        each token and head, so that the pool holds about twice the tokens of bfloat16.
    num_gpu_blocks_override: size of the pool in blocks; otherwise it follows from memory.
    kv_cache_memory_bytes: memory of the pool on the CPU; None takes a quarter of what is free.
    swap_space: GiB of host memory for the blocks of preempted requests, which are moved there and
        back where that is quicker than computing them again; None is 4 on CUDA, 0 on the CPU.
    gpu_memory_utilization: share of the device that weights, a peak step and the pool may take.
    max_num_seqs: sequences that run at once, so also the most branches of one request.
    max_num_batched_tokens: token budget of a step.
    max_queue: requests that may wait.
    wait_for_inflight: let a request wait for prompt blocks that another is computing just now.
    seed: base of the random streams of requests without a seed; None draws one at start.
    digest_seed: seed of the block digests; None draws a secret one at start.
    max_leases: kept sequences (`keep_seconds`) at once; max_keep_seconds bounds each.
    attention_backend: kernels: "auto" (the fastest that works here), "triton", "cpu" or "torch".
    batch_invariant: on CUDA, linear layers whose rows do not depend on the batch, so that results
        are the same bits however they are served; slower. On the CPU that is always so.
    enforce_eager: launch every step kernel by kernel; else decode steps are replayed from graphs
        that are captured at start, where the kernels allow it (Triton's).
    activation_quantization: None, or "int8": on the CPU, linear layers on Q8_0, Q4_0 and Q4_1
        weights quantise their input in groups of 32; faster, and other numbers than float32.
    num_threads: CPU threads of the model; None leaves it to torch.
    metrics_tenants: cache salts whose tokens are counted apart, the first so many; 0: none.
    limits: what one request may ask.
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | str | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    swap_space: float | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 1024
    enable_prefix_caching: bool = True
    wait_for_inflight: bool = True
    seed: int | None = None
    digest_seed: int | None = None
    max_leases: int = 1024
    max_keep_seconds: float = 3600.0
    attention_backend: str = "auto"
    batch_invariant: bool = False
    enforce_eager: bool = False
    activation_quantization: str | None = None
    num_threads: int | None = None
    metrics_tenants: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _require(self.dtype in ("auto", "float32", "bfloat16", "float16"), f"dtype {self.dtype!r}")
        _require(self.device in ("auto", "cpu", "cuda"), f"device {self.device!r}")
        _require(self.kv_cache_dtype in ("auto", "fp8"), f"kv_cache_dtype {self.kv_cache_dtype!r}")
        _require(
            self.activation_quantization in (None, "int8"),
            f"activation_quantization {self.activation_quantization!r}: None or 'int8'",
        )
        size = self.block_size
        _require(
            1 <= size <= 128 and size & (size - 1) == 0,
            f"block_size must be a power of two from 1 to 128, not {size}",
        )
        _require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization must be in (0, 1]")
        _require(self.swap_space is None or 0 <= self.swap_space < _MOST, "swap_space: GiB from 0")
        _require(self.max_num_seqs >= 1, "max_num_seqs must be at least 1")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
            f"({self.max_num_seqs}): each running sequence takes one token of a step",
        )
        backends = ("auto", "triton", "cpu", "torch")
        _require(
            self.attention_backend in backends,
            f"attention_backend {self.attention_backend!r}: one of {', '.join(backends)}",
        )
        _require(self.max_num_seqs <= _MOST, f"max_num_seqs must be at most {_MOST}")
        _require(self.max_queue >= 1, "max_queue must be at least 1")
        if isinstance(self.max_model_len, str):
            _require(self.max_model_len == "auto", f"max_model_len {self.max_model_len!r}")
        elif self.max_model_len is not None:
            _require(self.max_model_len >= 2, "max_model_len must be at least 2")
        if self.num_gpu_blocks_override is not None:
            _require(self.num_gpu_blocks_override >= 1, "num_gpu_blocks_override must be positive")
            _require(
                self.num_gpu_blocks_override <= _MOST,
                f"num_gpu_blocks_override must be at most {_MOST}",
            )
        if self.num_threads is not None:
            _require(self.num_threads >= 1, "num_threads must be at least 1")
        if self.seed is not None:
            _require(0 <= self.seed < 2**64, "seed must be a whole number of 64 bits")
        _require(self.metrics_tenants >= 0, "metrics_tenants must not be negative")
        _require(self.max_leases >= 0, "max_leases must not be negative")
        _require(self.max_keep_seconds >= 0, "max_keep_seconds must not be negative")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigurationError(message)
