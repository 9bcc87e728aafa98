"""Bytes that were once right."""

from typing import Any

from hypothesis import strategies as st

_BYTES = st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF]) | st.integers(0, 255)
_KINDS = st.sampled_from(["set", "insert", "cut", "repeat", "truncate"])


def mostly(
    usual: st.SearchStrategy[Any], strange: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """Strange once in a while: what has many parts still gets past the first check."""
    return st.integers(0, 15).flatmap(lambda one: strange if one == 11 else usual)


@st.composite
def mutated(draw: st.DrawFn, data: bytes, first: int | None = None) -> bytes:
    """`data` with some bytes changed, put in, left out or repeated; only among the first ones."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if not found:
            break
        at = draw(st.integers(0, min(len(found), first or len(found)) - 1))
        size = draw(st.integers(1, 16))
        match draw(_KINDS):
            case "set":
                found[at] = draw(_BYTES)
            case "insert":
                found[at:at] = bytes(draw(st.lists(_BYTES, min_size=1, max_size=8)))
            case "cut":
                del found[at : at + size]
            case "repeat":
                found[at:at] = found[at : at + size]
            case _:
                del found[at:]
    return bytes(found)
