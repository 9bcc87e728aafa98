"""Taking a port, or saying in one sentence why not."""

import errno
import socket

from prefixcache.errors import ConfigurationError


def listen(host: str, port: int, host_flag: str, port_flag: str) -> socket.socket:
    """A listening socket. Raises ConfigurationError that says which flag to change, and to what."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]  # no address twice
        advice = _ADVICE.get(error.errno or 0, "see {host_flag} and {port_flag}")
        raise ConfigurationError(
            f"cannot listen on {address(host, port)}: {reason}; "
            + advice.format(host_flag=host_flag, port_flag=port_flag)
        ) from None


_ADVICE = {
    errno.EADDRINUSE: "choose another with {port_flag} (0 takes any free one), or end the program "
    "that has it",
    errno.EACCES: "choose one above 1023 with {port_flag}",
    errno.EADDRNOTAVAIL: "give an address of this machine to {host_flag}",
}


def address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
