"""What both ends of a channel must agree on."""

from prefixcache.limits import MAX_MESSAGE_BYTES, Limits

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 50052
DEFAULT_TARGET = f"{DEFAULT_HOST}:{DEFAULT_PORT}"


def target_of(server: str) -> str:
    """A gRPC target from host:port, or from a host alone, whose port is then the default."""
    bare = server.count(":") == 0 or server.endswith("]")  # an IPv6 address stands in brackets
    return f"{server}:{DEFAULT_PORT}" if bare else server


def server_options(limits: Limits) -> tuple[tuple[str, int], ...]:
    """Of a server's channels.

    Calls that come faster than Python takes them wait in gRPC, which resets some above the first
    number, by chance, and all above the second, without a word. Its own (1,000 and 3,000) are below
    what may be open: what is too much is to be refused with a status and when to try again.
    """
    return (
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.server.max_pending_requests", limits.open_calls + 8_000),
        ("grpc.server.max_pending_requests_hard_limit", limits.open_calls + 12_000),
    )


CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # the server says what is too long
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
