"""How a client connects: the channel with its credentials, and what goes with each call.

Both clients share it, and use it for every server that they talk to. A token goes into the metadata
of each call; over a connection without TLS anybody on the way can read it there.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from prefixcache.errors import InvalidArgument
from prefixcache_service.limits import CLIENT_OPTIONS

TOKEN_VARIABLE = "PREFIXCACHE_TOKEN"
SYSTEM_CA = "system"

File = str | Path


def call_options(token: str | None, timeout: float | None) -> Mapping[str, Any]:
    """What each call of a stub is given. token: None takes $PREFIXCACHE_TOKEN, where it is set."""
    token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    if not (token.isascii() and token.isprintable()):
        raise InvalidArgument("token", "must be printable ASCII")
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    return {"timeout": timeout, "metadata": metadata}


def connector(grpc_or_aio: Any, ca: File | None, certificate: File | None) -> Callable[[str], Any]:
    """What makes a channel to host:port, of `grpc` or of `grpc.aio`; files are read once, here."""
    tls = _credentials(ca, certificate)

    def connect(address: str) -> Any:
        if tls is None:
            return grpc_or_aio.insecure_channel(address, options=CLIENT_OPTIONS)
        return grpc_or_aio.secure_channel(address, tls, options=CLIENT_OPTIONS)

    return connect


def _credentials(ca: File | None, certificate: File | None) -> grpc.ChannelCredentials | None:
    """Of a channel; None: no TLS.

    ca: PEM file of who signs the server's certificate, or "system". certificate: PEM file of the
    client's own certificate chain and its key. Raises InvalidArgument: a file cannot be read.
    """
    if not ca and not certificate:
        return None
    roots = _read("ca", ca) if ca and str(ca) != SYSTEM_CA else None
    own = _read("certificate", certificate) if certificate else None
    return grpc.ssl_channel_credentials(roots, private_key=own, certificate_chain=own)


def _read(field: str, path: File) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(field, f"{path}: {error.strerror}") from None
