"""What filters, methods and operators of a chat template would make, before they make it.

Owns the estimates: upper bounds of characters, with an item of a list counted as `ITEM` of them.
What is not named here makes no more than it is given.
"""

import re
from collections.abc import Callable, ItemsView, KeysView, Sequence, ValuesView
from typing import Any

from jinja2.utils import Namespace

ITEM = 16
"""What an item weighs, whatever it is: near the bytes that it takes."""
SLOW = 16
"""How much more text counts where it is gone through in Python, and no clock is looked at."""
MAX_BITS = 1 << 16
"""Of a whole number: beyond, arithmetic takes as long as it likes."""
MAX_BASE_OR_POWER = 64
TOO_MUCH = 1 << 62

Arguments = Sequence[Any]

_HOLDERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def weigh(value: Any, enough: int = TOO_MUCH) -> int:
    """Characters and items of a value and of all that it holds; not counted much beyond enough."""
    total, open_ = 0, [iter((value,))]
    while open_ and total <= enough:
        for one in open_[-1]:
            total += _own_weight(one)
            if isinstance(one, dict):
                open_ += [iter(one.values()), iter(one)]
                break
            if isinstance(one, _HOLDERS):
                open_.append(iter(one))
                break
        else:
            open_.pop()
    return total


def _own_weight(value: Any) -> int:
    if isinstance(value, str | bytes):
        return 1 + len(value)
    if isinstance(value, dict):
        return 1 + 2 * ITEM * len(value)
    if isinstance(value, (range, *_HOLDERS)):
        return 1 + ITEM * len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    if isinstance(value, Namespace):  # written out with all that it holds
        return TOO_MUCH
    return 1


def estimate(name: str, values: Arguments) -> float:
    """What a filter or method would make of values, the first of which it is applied to."""
    known = _ESTIMATES.get(name)
    return known(values) if known is not None and values else 0


def estimate_operator(operator: str, left: Any, right: Any) -> float:
    """What `left operator right` would make."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return TOO_MUCH if max(abs(left), abs(right)) > MAX_BASE_OR_POWER else 0
        return TOO_MUCH if left.bit_length() + right.bit_length() > MAX_BITS else 0
    if operator == "+":
        return weigh(left) + weigh(right)
    if operator == "*":
        return weigh(left) * _number(right) + _number(left) * weigh(right)
    if operator == "%" and isinstance(left, str | bytes):
        return _formatted([left, right])
    return 0


def _number(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else 0


def _widened(values: Arguments) -> float:
    """As much for each character as the greatest number, or the longest text, beside it."""
    rest = values[1:]
    return weigh(values[0]) * max([1, *map(_number, rest), *map(weigh, rest)])


def _replaced(values: Arguments) -> float:
    text, old, new = (weigh(value) for value in [*values, "", ""][:3])
    return text + (text // max(1, old - 1) + 1) * new


def _joined(parts: Any, between: Any) -> float:
    count = len(parts) if hasattr(parts, "__len__") else weigh(parts) + 1
    return weigh(parts) + count * weigh(between)


def _formatted(values: Arguments) -> float:
    """Each width that is written counts once, each value and each width among them once a field."""
    form, others = str(values[0]), values[1:]
    written = sum(int(number[:18]) for number in re.findall(r"\d+", form))
    fields = form.count("%") + form.count("{") + 1
    widths = [_number(one) for value in others for one in _flat(value)]
    return len(form) + written + fields * (weigh(others) + max(widths, default=0))


def _flat(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return tuple(value.values())
    return value if isinstance(value, list | tuple) else (value,)


def _split(values: Arguments) -> float:
    text, between = [*values, None][:2]
    if not isinstance(text, str):
        return 0
    pieces = text.count(between) if isinstance(between, str) and between else len(text) // 2
    return len(text) + ITEM * pieces


def _summed(values: Arguments) -> float:
    """Of what is no number, each partial sum is copied."""
    first = values[0]
    numbers = isinstance(first, list | tuple | range) and all(
        isinstance(one, int | float) for one in first
    )
    return weigh(first) if numbers else weigh(first) ** 2 // ITEM


def _slow(values: Arguments) -> float:
    return SLOW * weigh(values)


def _digits(values: Arguments) -> float:
    """Of a number as text: work grows with the square of its length."""
    return weigh(values[0]) ** 2


_ESTIMATES: dict[str, Callable[[Arguments], float]] = {
    **dict.fromkeys(
        ("batch", "center", "expandtabs", "hex", "indent", "ljust", "rjust", "round", "slice"),
        _widened,
    ),
    **dict.fromkeys(("to_bytes", "tojson", "translate", "zfill"), _widened),
    **dict.fromkeys(("format", "format_map"), _formatted),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _split),
    **dict.fromkeys(("pprint", "striptags", "title", "unique", "wordcount"), _slow),
    **dict.fromkeys(("int", "float", "from_bytes"), _digits),
    "wordwrap": lambda values: SLOW * weigh(values[0]) * max([1, *map(weigh, values[1:])]),
    "urlize": lambda values: SLOW * weigh(values[0]) * max([1, *map(weigh, values[1:])]),
    "xmlattr": lambda values: SLOW * weigh(values),
    "string": lambda values: weigh(values[0]),
    "list": lambda values: ITEM * len(values[0]) if hasattr(values[0], "__len__") else 0,
    "sum": _summed,
    "replace": _replaced,
    "join": lambda values: max(_joined(*pair) for pair in _either_way(values)),
}


def _either_way(values: Arguments) -> list[tuple[Any, Any]]:
    """The filter `join` is given the parts first, the method the text between them."""
    first, second = [*values, ""][:2]
    return [(first, second), (second, first)]
