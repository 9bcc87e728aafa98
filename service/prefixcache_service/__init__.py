"""The gRPC service, its clients, the command line and the HTTP side."""

from prefixcache_service.aio import AsyncClient, AsyncStream
from prefixcache_service.client import Client, Stream
from prefixcache_service.requests import BeamOptions, BeamSearch, Branch, Options, Prompt, Sampling
from prefixcache_service.results import (
    Completion,
    ContinuationScore,
    Delta,
    GenerateResult,
    ModelInfo,
    ScoreResult,
    TokenLogprob,
    TokenLogprobs,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BeamOptions",
    "BeamSearch",
    "Branch",
    "Client",
    "Completion",
    "ContinuationScore",
    "Delta",
    "GenerateResult",
    "ModelInfo",
    "Options",
    "Prompt",
    "Sampling",
    "ScoreResult",
    "Stream",
    "TokenLogprob",
    "TokenLogprobs",
]
