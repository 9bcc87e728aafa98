"""How a client connects: the channel's credentials, and what goes with each call.

Both clients share it. A token goes into the metadata of each call; over a connection without TLS
anybody on the way can read it there.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from prefixcache.errors import InvalidArgument

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


def credentials(ca: File | None, certificate: File | None) -> grpc.ChannelCredentials | None:
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
