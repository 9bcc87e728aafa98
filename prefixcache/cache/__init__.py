"""The cache: which physical blocks hold which tokens, and who uses them. No torch, no model.

Start reading at `manager.py`; `trie.py` is the data structure, `eviction.py` the order of reuse.
"""

from prefixcache.cache.digest import BlockDigest, namespace_key
from prefixcache.cache.events import CacheObserver
from prefixcache.cache.integrity import IntegrityError, check_integrity
from prefixcache.cache.manager import BlockManager, token_bytes
from prefixcache.cache.pool import NoFreeBlocks
from prefixcache.cache.swap import Snapshot, SwapSpace
from prefixcache.cache.table import BlockCopy, BlockTable, Lease, Pin
from prefixcache.cache.trie import Match

__all__ = [
    "BlockCopy",
    "BlockDigest",
    "BlockManager",
    "BlockTable",
    "CacheObserver",
    "IntegrityError",
    "Lease",
    "Match",
    "NoFreeBlocks",
    "Pin",
    "Snapshot",
    "SwapSpace",
    "check_integrity",
    "namespace_key",
    "token_bytes",
]
