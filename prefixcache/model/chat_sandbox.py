"""The jinja environment of chat templates: a sandbox in which every template comes to its end.

A template is a program that comes with a downloaded model. jinja's sandbox keeps it from Python's
internals, and from files since it has no loader; but of loops it bounds `range` alone. Here each
turn of a loop and each call looks at the clock, and whatever makes text is weighed: before, where
what it makes may be far larger than what it was given (`chat_weights`), and behind, against what
one rendering may make in all.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from prefixcache.model.chat_weights import ITEM, estimate, estimate_operator, weigh

MAX_SECONDS = 2.0
MAX_SIZE = 1 << 24
"""Characters of one value; an item of a list counts as some."""
MAX_TOTAL = 1 << 27
"""Characters of all values that one rendering makes."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox with bounds; what goes beyond one raises a TemplateError."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._put_out, **options)
        self._running = threading.local()
        del self.globals["lipsum"]  # makes any amount of text from nothing
        for name, function in self.filters.items():
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Offer a filter; what it makes is bounded."""

        @functools.wraps(function)
        def bounded(*arguments: Any, **named: Any) -> Any:
            values = [_held(value) for value in arguments]
            self._expect(name, [v for v in values if not isinstance(v, _PASSED)], named)
            return self._made(function(*values, **named))

        self.filters[name] = bounded

    def begin(self) -> None:
        """Start the time and the account of one compilation or rendering on this thread."""
        self._running.until = time.monotonic() + MAX_SECONDS
        self._running.total = 0

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render a template of this environment, in MAX_SECONDS at most."""
        self.begin()
        return template.render(variables)

    def look_at_the_clock(self) -> None:
        """Raise where the time of the present rendering is up."""
        if time.monotonic() > self._running.until:
            raise jinja2.TemplateError(f"it takes more than {MAX_SECONDS:g} seconds")

    # ------------------------------------------------------------ what makes values

    def call(  # noqa: D102 (see SandboxedEnvironment)
        self,
        context: jinja2.runtime.Context,
        callable_: Any,
        /,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        method = getattr(callable_, "__wrapped__", callable_)  # jinja wraps str.format
        owner, values = getattr(method, "__self__", None), [_held(a) for a in arguments]
        applied = [owner, *values] if isinstance(owner, _VALUES) else values
        self._expect(getattr(callable_, "__name__", ""), applied, named)
        return self._made(super().call(context, callable_, *values, **named))

    def call_binop(  # noqa: D102
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if estimate_operator(operator, left, right) > MAX_SIZE:
            _refuse(operator)
        return self._made(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[str]) -> str:
        """What a template, a macro or a block puts out, as one text."""
        pieces, size = [], 0
        for part in parts:
            size += len(part)
            if size > MAX_SIZE:
                _refuse("this")
            pieces.append(part)
        return str(self._made("".join(pieces)))

    def tilde(self, *values: Any) -> str:
        """The operator `~`."""
        return self.concat(str(self._put_out(value)) for value in values)

    def literal(self, value: Any) -> Any:
        """A list, tuple or dictionary that is written out: `call` puts it on the account."""
        return value

    def part(self, value: Any, *bounds: int | None) -> Any:
        """A slice, `value[start:stop:step]`."""
        return value[slice(*bounds)]

    def _put_out(self, value: Any) -> Any:
        if not isinstance(value, str) and weigh(value, MAX_SIZE) > MAX_SIZE:
            _refuse("this")
        return value

    def _expect(self, name: str, values: Iterable[Any], named: Mapping[str, Any]) -> None:
        """Before a call: raise where it would make something too large, or where time is up."""
        self.look_at_the_clock()
        if estimate(name, [*values, *named.values()]) > MAX_SIZE:
            _refuse(name)

    def _made(self, value: Any) -> Any:
        """Behind it: put what it made on the account."""
        if isinstance(value, str | bytes):
            self._running.total += len(value)
        elif isinstance(value, list | tuple | dict):
            self._running.total += ITEM * len(value)
        if self._running.total > MAX_TOTAL:
            raise jinja2.TemplateError("it makes too much text on the way")
        return value

    # ------------------------------------------------------------ the syntax tree

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree, with a look at the clock in each loop."""
        tree = super()._parse(source, name, filename)
        _Calls(self).visit(tree)
        for loop in tree.find_all(nodes.For):
            look = _call(self, "look_at_the_clock", [], loop.lineno)
            statement = nodes.ExprStmt(look, lineno=loop.lineno)
            statement.set_environment(self)
            loop.body.insert(0, statement)
        return tree


class _Calls(NodeTransformer):
    """Makes calls of what jinja does not let a sandbox see: `~`, slices, and lists written out."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (jinja's interface)
        self.generic_visit(node)
        return _call(self._environment, "tilde", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call(self._environment, "literal", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call(self._environment, "literal", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.ctx != "load":  # what is assigned to
            return node
        return _call(self._environment, "literal", [node], node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [b or nodes.Const(None) for b in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call(self._environment, "part", [node.node, *bounds], node.lineno)


def _call(
    environment: BoundedEnvironment, method: str, arguments: list[nodes.Expr], line: int
) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)
    call.set_environment(environment)
    call.set_lineno(line)
    return call


_PASSED = (jinja2.runtime.Context, jinja2.Environment, nodes.EvalContext)
_VALUES = (str, bytes, int, float, list, tuple, dict)


def _held(value: Any) -> Any:
    """What a filter would give bit by bit as a list, which can be weighed."""
    return list(value) if isinstance(value, GeneratorType) else value


def _refuse(what: str) -> NoReturn:
    raise jinja2.TemplateError(f"{what} would make something too large")
