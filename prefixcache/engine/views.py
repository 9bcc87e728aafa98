"""What inspection answers: the pool and the tree as an operator sees them.

Plain frozen data that serialises, like `messages`; `inspect` fills it in.
"""

from dataclasses import dataclass

from prefixcache.engine.messages import CacheStats, PinInfo, SequenceInfo, TokenIds

# A block's state is one byte: these flags, and in the low bits how many live sequences share it.
SHARERS = 0x1F
CACHED = 0x20  # holds KV; without it the block is free and the byte is 0
LEASED = 0x40
PINNED = 0x80


@dataclass(frozen=True, slots=True)
class NodeView:
    """One run of blocks in the tree, or the root of a namespace (no blocks).

    digest: of its first block; names it. parent: index in the list that it comes in, -1 for none.
    start: blocks before it. uses: requests that began on it, the one that made it not counted.
    sharers: live sequences that use it now. age, idle: seconds since it was made and last used.
    token_ids: the first of its run, where they were asked for.
    """

    digest: bytes
    parent: int
    start: int
    num_blocks: int
    num_children: int
    uses: int
    sharers: int
    leased: bool
    pinned: bool
    age: float
    idle: float
    token_ids: TokenIds = ()


@dataclass(frozen=True, slots=True)
class PinView:
    """A pin and the node at which it ends."""

    pin: PinInfo
    digest: bytes


@dataclass(frozen=True, slots=True)
class CacheView:
    """One moment.

    blocks: the state of each, one byte, by id. nodes: the most used ones, parents first.
    sequences: running before waiting before kept; num_sequences counts those left out too.
    hypotheses: ids of those sequences that are beams of a search that runs; nobody can fork them.
    """

    stats: CacheStats
    blocks: bytes
    nodes: tuple[NodeView, ...]
    pins: tuple[PinView, ...]
    sequences: tuple[SequenceInfo, ...]
    num_sequences: int
    hypotheses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeDetail:
    """Who uses a node.

    live, kept: ids of sequences whose tokens begin with it; num_live and num_kept count all.
    children: the most used ones, as far as they are told.
    """

    node: NodeView
    live: tuple[str, ...]
    num_live: int
    kept: tuple[str, ...]
    num_kept: int
    pins: tuple[PinInfo, ...]
    children: tuple[NodeView, ...]
    token_ids: TokenIds = ()
