"""How large the pool is, and what can never fit in it: arithmetic, shown where it refuses."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from prefixcache.cache.trie import common_tokens
from prefixcache.config import EngineConfig
from prefixcache.errors import ConfigurationError, ResourceExhausted

DEFAULT_CPU_SHARE = 0.25
"""Share of the memory that the process's control group leaves, taken for the pool on the CPU."""


DEFAULT_SWAP_SPACE = 4.0
"""GiB of pinned host memory beside a GPU; on the CPU the pool is in host memory itself."""


def blocks_at_most(
    prompts: Sequence[int], shared: Sequence[int], extra: Sequence[int], block_size: int
) -> int:
    """Blocks of sequences that share what they can, when each has grown to its end.

    prompts: tokens that each begins with. shared: how many of those are counted already, with
    another sequence. extra: tokens that each may generate; the last one's KV is never written.
    """
    own = 0
    for prompt, common, more in zip(prompts, shared, extra, strict=True):
        own += -(-(prompt + max(more - 1, 0)) // block_size) - common // block_size
    return own


def shared_tokens(prompts: Sequence[bytes]) -> list[int]:
    """For each prompt (token bytes), how many tokens one that sorts before it begins with too.

    In sorted order, what a prompt has in common with any before it, it has with the last.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    shared = [0] * len(prompts)
    for before, at in pairwise(order):
        shared[at] = common_tokens(prompts[before], prompts[at])
    return shared


def check_fits(needed: int, num_blocks: int, block_size: int, what: str) -> None:
    """Refuse what can never fit in the empty pool. Raises ResourceExhausted with the arithmetic."""
    if needed > num_blocks:
        raise ResourceExhausted(
            f"{what} needs {needed} blocks of {block_size} tokens; the pool has {num_blocks}. "
            "Ask for fewer tokens or branches, or start the server with a larger pool."
        )


def pool_blocks(config: EngineConfig, bytes_per_block: int, available_bytes: int) -> int:
    """Blocks of the pool: as configured, or what the available memory holds."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        available_bytes = config.kv_cache_memory_bytes
    return max(available_bytes // bytes_per_block, 0)


def swap_blocks(config: EngineConfig, bytes_per_block: int, *, on_gpu: bool) -> int:
    """Blocks in host memory for preempted requests: by default some behind a GPU, none else."""
    gib = config.swap_space
    if gib is None:
        gib = DEFAULT_SWAP_SPACE if on_gpu else 0.0
    return int(gib * 2**30) // bytes_per_block


def max_model_len(config: EngineConfig, model_max: int, num_blocks: int, per_block: int) -> int:
    """The longest sequence served, in tokens.

    Raises ConfigurationError, with the arithmetic, where the pool cannot hold one such sequence.
    """
    held = num_blocks * config.block_size
    if config.max_model_len == "auto":
        if held < 2:
            raise ConfigurationError(f"a pool of {num_blocks} blocks holds no sequence at all")
        return min(model_max, held)
    wanted = model_max if config.max_model_len is None else int(config.max_model_len)
    if wanted > model_max:
        raise ConfigurationError(
            f"max_model_len {wanted} is beyond the model's own length of {model_max} tokens"
        )
    if wanted > held:
        need = -(-wanted // config.block_size)
        raise ConfigurationError(
            f"one sequence of max_model_len = {wanted} tokens needs {need} blocks of "
            f"{config.block_size} tokens ({need * per_block / 2**20:,.0f} MiB of KV cache), but "
            f"the pool has {num_blocks} ({num_blocks * per_block / 2**20:,.0f} MiB). The largest "
            f"length that fits is {held}: set max_model_len to at most that or to auto, or give "
            "the pool more memory."
        )
    return wanted


def cpu_memory_left() -> int:
    """Bytes that this process's control group, and the machine, still have."""
    left = _meminfo("MemAvailable")
    group = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if group[0] is not None and group[1] is not None:
        left = min(left, group[0] - group[1])
    return max(left, 0)


def _meminfo(field: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
