"""Ports and addresses: taking one, advertising one, or saying in one sentence why not."""

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


def advertised(text: str) -> tuple[str, int]:
    """Host and port of an --advertise-address; port 0 stands for the one that is listened on.

    Raises ConfigurationError where it is not host:port, or the host cannot be resolved.
    """
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdigit() and int(port) < 2**16) or (
        ":" in bare and bare == host
    ):
        raise ConfigurationError(
            f"--advertise-address {text!r} is not HOST:PORT, such as replica-0.example:50051 "
            "(an IPv6 host in brackets; port 0 for the one that is listened on)"
        )
    try:
        socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"--advertise-address {text}: {bare!r} cannot be resolved ({reason}); give a name or "
            "an address under which clients reach this very server"
        ) from None
    return bare, int(port)
