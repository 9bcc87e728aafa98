"""What a gateway in front of several servers speaks: vLLM's engine service, `VllmEngine`.

Served on the same port and over the same engine where the extra `prefixcache[gateway]` is
installed, which brings its messages (the package smg-grpc-proto).
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

    from prefixcache_service.front import AsyncFront
    from prefixcache_service.servicer import Served


class Serves(Protocol):
    """What a server needs to know of a servicer."""

    def serve(self, model: "Served") -> None:
        """Name the model that is served."""


def services(
    front: "AsyncFront", threads: ThreadPoolExecutor
) -> "Mapping[ServiceDescriptor, Serves]":
    """The service by its descriptor; nothing where the extra is not installed."""
    try:
        from prefixcache_service.gateway import servicer  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as error:
        if error.name != "smg_grpc_proto":
            raise
        return {}
    return {servicer.SERVICE: servicer.GatewayServicer(front, threads)}
