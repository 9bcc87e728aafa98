"""prefixcache: a forkable prefix cache and parallel sampling for language models.

>>> from prefixcache import Engine, EngineConfig, SamplingParams
>>> engine = Engine(EngineConfig(model="smollm2"))
>>> out = engine.generate(["The sky is"], SamplingParams(n=4, max_tokens=64, seed=7))[0]
>>> out.num_cached_tokens, out.outputs[0].text
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if "OMP_WAIT_POLICY" not in os.environ:
    # Before torch loads OpenMP: threads at a barrier spin for microseconds and then sleep. By
    # default they spin for milliseconds, and a second program on the same cores makes a step 10 to
    # 100 times as slow; on idle cores the two are equal.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from prefixcache.config import EngineConfig
    from prefixcache.engine.engine import Engine
    from prefixcache.engine.outputs import CompletionOutput, RequestOutput
    from prefixcache.errors import PrefixCacheError
    from prefixcache.params import BeamSearchParams, SamplingParams

__all__ = [
    "BeamSearchParams",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "PrefixCacheError",
    "RequestOutput",
    "SamplingParams",
]

_HOMES = {
    "BeamSearchParams": "prefixcache.params",
    "CompletionOutput": "prefixcache.engine.outputs",
    "Engine": "prefixcache.engine.engine",
    "EngineConfig": "prefixcache.config",
    "PrefixCacheError": "prefixcache.errors",
    "RequestOutput": "prefixcache.engine.outputs",
    "SamplingParams": "prefixcache.params",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: clients need errors and parameters, not torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
