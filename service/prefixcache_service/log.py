"""Structured log lines, key=value, one a line on standard error.

Owns their form only. What is logged never holds a prompt, an output, a salt or a token.
"""

import json
import logging
import sys
from datetime import UTC, datetime

LOGGER_NAME = "prefixcache.service"


def info(event: str, **pairs: object) -> None:
    """Log what happened; silent until `configure`."""
    logging.getLogger(LOGGER_NAME).info(event, extra={"pairs": pairs})


def warning(event: str, **pairs: object) -> None:
    """Log what the operator should know."""
    logging.getLogger(LOGGER_NAME).warning(event, extra={"pairs": pairs})


def error(event: str, cause: BaseException | None = None, **pairs: object) -> None:
    """Log what went wrong, with the traceback of its cause."""
    logging.getLogger(LOGGER_NAME).error(event, exc_info=cause, extra={"pairs": pairs})


def configure(level: str = "info") -> None:
    """Send log lines of this level and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    log = logging.getLogger("prefixcache")
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False


class KeyValueFormatter(logging.Formatter):
    """`ts=… level=info event=call method=Generate request_id=… status=OK ms=12`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, where there is one, as a quoted value."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        pairs: dict[str, object] = {
            "ts": moment,
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "pairs", {}),
        }
        if record.exc_info:
            pairs["traceback"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_value(value)}" for key, value in pairs.items())


def _value(value: object) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in ' "=\\')
    return text if plain else json.dumps(text)
