"""Chat templates, which are programs from elsewhere: endless, huge, curious.

Whatever a template does, it gives a text of bounded size, or is refused; it takes bounded memory;
and nothing of this process gets into what it gives.
"""

import contextlib
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st

from prefixcache.errors import FailedPrecondition, InvalidArgument
from prefixcache.model import chat_sandbox
from prefixcache.model.chat import ChatTemplate
from tests.fuzz.target import Check, Target

SECRET = "a-secret-of-this-process"
PATH = "/the/file/of/the/secret"
"""Stands for a file that holds the secret."""
BOUNDS = {"MAX_SIZE": 1 << 14, "MAX_TOTAL": 1 << 18, "MAX_SECONDS": 0.05}
"""Small, so that what goes beyond them does no harm."""
MEMORY = 1 << 27
"""Far more than what is within those bounds takes, and less than what a width below asks for."""

MESSAGES = [
    {"role": "user", "content": "Hi {} %s <b> http://example.org 99999999"},
    {"role": "assistant", "content": "x" * 500},
]

NUMBERS = st.sampled_from(["0", "1", "2", "-1", "64", "1000", "99999", "500000000", "-500000000",
                           "64 ** 64", "0.5", "1e308", "true"])  # fmt: skip
STRINGS = st.sampled_from(
    ["''", "'x'", "' '", "'0'", "','", "'ab' * 99", "'%500000000d'", "'%*d'", "'{:>500000000}'",
     "'{0:{1}}'", "'{0.__class__}'", "'{0}{0}{0}{0}'", "'%s%s%s'", "'x\\ty' * 9", "'1' * 4000",
     "'__class__'", "'__globals__'", f"'{PATH}'", "'\\n' * 500", "'http://a.b ' * 50"]
)  # fmt: skip
NAMES = st.sampled_from(
    ["messages", "messages[0]", "messages[1].content", "messages[1]['content']", "ns.a", "ns.b",
     "ns", "loop", "loop.index", "tools", "none_there", "range", "dict", "cycler", "joiner",
     "raise_exception", "strftime_now", "self", "m", "bos_token", "messages[0].items()",
     "range(99999)", "namespace", "caller", "varargs", "lipsum"]
)  # fmt: skip
FILTERS = st.sampled_from(
    ["abs", "attr", "batch", "capitalize", "center", "count", "default", "dictsort", "escape",
     "filesizeformat", "first", "float", "forceescape", "format", "groupby", "indent", "int",
     "items", "join", "last", "length", "list", "lower", "map", "max", "min", "pprint", "random",
     "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice",
     "sort", "string", "striptags", "sum", "title", "tojson", "trim", "truncate", "unique", "upper",
     "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"]
)  # fmt: skip
METHODS = st.sampled_from(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "format", "format_map",
     "encode", "split", "rsplit", "splitlines", "partition", "translate", "maketrans", "title",
     "upper", "strip", "items", "keys", "values", "copy", "append", "update", "pop", "to_bytes",
     "from_bytes", "bit_length", "hex", "decode", "fromkeys", "__class__", "__mro__", "__init__",
     "__globals__", "__subclasses__", "__code__", "__self__", "mro", "count", "index", "func_code"]
)  # fmt: skip
OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "~", "and", "or", "in", "=="])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arguments = st.lists(inner, max_size=3).map(", ".join)
    return st.one_of(
        st.builds("({} {} {})".format, inner, OPERATORS, inner),
        st.builds("({}|{})".format, inner, FILTERS),
        st.builds("({}|{}({}))".format, inner, FILTERS, arguments),
        st.builds("({}|map('{}', {}))".format, inner, FILTERS, inner),
        st.builds("{}.{}".format, inner, METHODS),
        st.builds("{}.{}({})".format, inner, METHODS, arguments),
        st.builds("{}({})".format, inner, arguments),
        st.builds("[{}]".format, arguments),
        st.builds("{{'k': {}, {}: 1}}".format, inner, inner),
        st.builds("{}[{}:]".format, inner, inner),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
    )


EXPRESSIONS = st.recursive(NUMBERS | STRINGS | NAMES, _grown, max_leaves=6)


def _statements(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    blocks = st.lists(inner, max_size=3).map("".join)
    return st.one_of(
        st.builds("{{% for i in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, blocks),
        st.builds("{{% for i in range(99999) %}}{}{{% endfor %}}".format, blocks),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, blocks),
        st.builds("{{% set ns.a %}}{}{{% endset %}}".format, blocks),
        st.builds("{{% macro m(a) %}}{}{{% endmacro %}}".format, blocks),
        st.builds("{{% call m({}) %}}{}{{% endcall %}}".format, EXPRESSIONS, blocks),
        st.builds("{{% filter {} %}}{}{{% endfilter %}}".format, FILTERS, blocks),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, blocks),
    )


STATEMENTS = st.recursive(
    st.one_of(
        st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
        st.builds("{{% set ns.a = {} %}}".format, EXPRESSIONS),
        st.builds("{{% set ns.b = ns.b ~ {} %}}".format, EXPRESSIONS),
        st.builds("{{% set ns.b = [ns.b, {}] %}}".format, EXPRESSIONS),
        st.builds("{{% {} {} %}}".format,
                  st.sampled_from(["include", "import", "extends", "from"]), STRINGS),
        st.just("{{ m(1) }}"),
        st.just("{% break %}"),
        st.text(max_size=4),
    ),
    _statements,
    max_leaves=5,
)  # fmt: skip
SOURCES = st.lists(STATEMENTS, min_size=1, max_size=4).map(
    lambda some: "{% set ns = namespace(a='x', b='y') %}" + "".join(some)
)


@contextlib.contextmanager
def rendered() -> Iterator[Check]:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"FUZZ_SECRET": SECRET}),
        mock.patch.multiple(chat_sandbox, **BOUNDS),
    ):
        secret = Path(folder) / "secret"
        secret.write_text(SECRET)

        def check(source: str) -> None:
            check_template(source.replace(PATH, str(secret)))

        yield check


def check_template(source: str) -> None:
    text = ""
    tracemalloc.start()
    try:
        text = ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES)
    except (InvalidArgument, FailedPrecondition) as error:
        assert SECRET not in str(error)  # noqa: PT017 (some are right)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY, peak
    assert len(text) <= BOUNDS["MAX_SIZE"]
    assert SECRET not in text


TEMPLATES = Target(
    "templates",
    SOURCES,
    rendered,
    few=80,
    many=600,
    load=lambda data: data.decode("utf-8", "surrogatepass"),
    dump=lambda source: source.encode("utf-8", "surrogatepass"),
)
