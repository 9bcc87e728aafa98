"""Taking a port, or saying in one sentence why not."""

import socket

from prefixcache.errors import ConfigurationError


def listen(host: str, port: int, flags: str) -> socket.socket:
    """A listening socket. Raises ConfigurationError that names the flags to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]  # no address twice
        raise ConfigurationError(
            f"cannot listen on {address(host, port)}: {reason}; see {flags}"
        ) from None


def address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
