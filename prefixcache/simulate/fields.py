"""Fields of a JSON line, checked: each error says which field is wrong, and how."""

import json
from typing import Any

_MOST = 1e15


def json_object(line: str) -> dict[str, Any]:
    """A line's JSON object. Raises ValueError."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    return value


def number(fields: dict[str, Any], name: str) -> float:
    """A number that is not negative. Raises ValueError naming the field."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {_shown(value)}, not a number")
    if not 0 <= value < _MOST:
        raise ValueError(f"{name} is {_shown(value)}, which is negative or beyond all bounds")
    return float(value)


def whole(fields: dict[str, Any], name: str, *, least: int = 0, most: int = 2**31 - 1) -> int:
    """A whole number, from `least` to `most`. Raises ValueError naming the field."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {_shown(value)}, not a whole number")
    if not least <= value <= most:
        raise ValueError(f"{name} is {_shown(value)}; it must be from {least} to {most}")
    return value


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]
