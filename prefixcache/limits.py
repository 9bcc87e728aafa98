"""The table of limits on what a caller may ask, each with its default.

Owns the numbers alone. `params` checks those of sampling and searching, the edge of a service the
rest: before any work, and each refusal names the field, the number and the limit to change.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from prefixcache.errors import ConfigurationError

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Of a reply; clients take no longer one."""

_MOST = 2**31 - 1


def _limit(default: int, what: str, *, least: int = 1, most: int = _MOST) -> Any:
    """A row: `what` is bounded, in the words of the table; least, most: what it may be set to."""
    return field(default=default, metadata={"what": what, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Limits:
    """At most so many, or so much. Raises ConfigurationError for what cannot be a limit.

    `prefixcache serve --limit n=64` sets one. Lengths of sequences, how many run, wait or are kept,
    and how long, are EngineConfig's: they size what a server holds.
    """

    n: int = _limit(256, "samples of one prompt: `n`")
    num_beams: int = _limit(256, "beams of a search: `num_beams`")
    branches: int = _limit(256, "branches of one Fork: `branches`")
    continuations: int = _limit(256, "continuations of one Score: `continuations`")
    score_logprobs: int = _limit(
        500_000,
        "log-probabilities in one Score: tokens of `continuations` times (1 + `top_logprobs`)",
        most=500_000,  # the reply is one message: some 60 bytes are left for each
    )
    logprobs: int = _limit(
        64,
        "`logprobs`, `prompt_logprobs`, `top_logprobs`",
        most=256,  # a chunk has them for 1,024 tokens
    )
    stop: int = _limit(64, "stop strings: `stop`")
    stop_chars: int = _limit(1024, "characters of one stop string")
    stop_token_ids: int = _limit(256, "stop tokens: `stop_token_ids`")
    logit_bias: int = _limit(1024, "biased tokens: `logit_bias`")
    chat_messages: int = _limit(4096, "messages of one chat: `chat.messages`")
    sequence_ids: int = _limit(1024, "sequences of one Release: `sequence_ids`")
    request_id_chars: int = _limit(
        128,
        "printable characters of a `request_id`",
        least=32,  # of those that a server draws
    )
    cache_salt_chars: int = _limit(256, "characters of a `cache_salt`")
    message_bytes: int = _limit(MAX_MESSAGE_BYTES, "bytes of a request")
    open_calls: int = _limit(4096, "calls that are open at once, streams above all", most=1_000_000)
    tenant_calls: int = _limit(1024, "of these, calls of one tenant, over all its connections")
    waiting_events: int = _limit(65_536, "cache events that wait for a watcher who reads slowly")

    def __post_init__(self) -> None:
        for row in fields(self):
            value, least, most = (
                getattr(self, row.name),
                row.metadata["least"],
                row.metadata["most"],
            )
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigurationError(
                    f"--limit {row.name} must be a whole number from {least} to {most}, not "
                    f"{value!r}"
                )

    @classmethod
    def parse(cls, settings: Iterable[str]) -> "Limits":
        """The defaults but for settings such as "n=64". Raises ConfigurationError."""
        given = {}
        for setting in settings:
            name, _, number = setting.partition("=")
            name = name.strip().replace("-", "_")
            if name not in cls.__dataclass_fields__:
                raise ConfigurationError(
                    f"--limit {setting}: there is no such limit; write NAME=NUMBER, such as "
                    f"{', '.join(f'{row.name}={row.default}' for row in fields(cls))}"
                )
            try:
                given[name] = int(number.replace("_", ""))
            except ValueError:
                raise ConfigurationError(
                    f"--limit {setting}: {number!r} is no whole number"
                ) from None
        return cls(**given)


DEFAULTS = Limits()


def flag(name: str) -> str:
    """What a refusal says behind the number of a limit."""
    return f"(--limit {name})"
