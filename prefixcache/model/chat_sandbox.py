"""The jinja environment of chat templates: a sandbox in which every template comes to its end.

A template is a program that comes with a downloaded model. jinja's sandbox keeps it from Python's
internals, and from files since it has no loader; but of loops it bounds `range` alone. Here each
turn of a loop and each call looks at the clock, and `+`, `*` and `**` refuse to make what is huge.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 2.0
MAX_SIZE = 1 << 24
"""Characters or items of one value."""
MAX_BASE_OR_POWER = 64


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox with bounds; what goes beyond one raises a TemplateError."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._running = threading.local()

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render a template of this environment, in MAX_SECONDS at most."""
        self._running.until = time.monotonic() + MAX_SECONDS
        return template.render(variables)

    def look_at_the_clock(self) -> None:
        """Raise where the time of the present rendering is up."""
        if time.monotonic() > self._running.until:
            raise jinja2.TemplateError(f"it takes more than {MAX_SECONDS:g} seconds")

    def call(  # noqa: D102 (see SandboxedEnvironment)
        self,
        context: jinja2.runtime.Context,
        callable_: Any,
        /,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        self.look_at_the_clock()
        return super().call(context, callable_, *arguments, **named)

    def call_binop(  # noqa: D102
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _is_too_large(operator, left, right):
            raise jinja2.TemplateError(f"{operator} would make something too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree, with a look at the clock in each loop."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            look = nodes.Call(nodes.EnvironmentAttribute("look_at_the_clock"), [], [], None, None)
            statement = nodes.ExprStmt(look, lineno=loop.lineno)
            statement.set_environment(self)
            statement.set_lineno(loop.lineno)
            loop.body.insert(0, statement)
        return tree


def _is_too_large(operator: str, left: Any, right: Any) -> bool:
    if operator == "+":
        return _size(left) + _size(right) > MAX_SIZE
    if operator == "*":
        return _size(left) * _number(right) + _number(left) * _size(right) > MAX_SIZE
    return max(_number(left), _number(right)) > MAX_BASE_OR_POWER


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _number(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else 0
