"""Chat templates: from messages to the text of a prompt.

Owns the jinja environment, which offers what Hugging Face's offers and runs in a sandbox, since a
template comes with a downloaded model. Knows no tokens; the caller encodes the text it gets back
without adding special tokens, since templates write their own.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from prefixcache.errors import FailedPrecondition, InvalidArgument
from prefixcache.model.chat_sandbox import BoundedEnvironment

MAX_SOURCE = 1 << 20
"""Characters of a template."""


class ChatTemplate:
    """A model's chat template, compiled at first use.

    special_tokens: what `{{ bos_token }}`, `{{ eos_token }}` and the like stand for.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._environment = _environment()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt of a conversation.

        messages: mappings with at least a `role`, usually `content`; keys whose value is None are
            dropped, as templates ask whether a key is there.
        Raises InvalidArgument("messages") if there are none, if the template refuses or fails on
        them, or if text holds half of a surrogate pair; FailedPrecondition if the template itself
        is broken.
        """
        variables = {
            **self._special_tokens,
            "messages": _clean(messages),
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compiled
        try:
            text = self._environment.render(template, variables)
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("messages", f"text is not Unicode: {error.reason}") from error
        except Exception as error:  # a template can fail in any way: it is a program from elsewhere
            raise InvalidArgument("messages", f"the chat template refuses them: {error}") from error
        return text

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.source) > MAX_SOURCE:
            raise FailedPrecondition(
                f"the model's chat template has {len(self.source)} characters; at most "
                f"{MAX_SOURCE} are compiled: send text instead"
            )
        self._environment.begin()
        try:
            return self._environment.from_string(self.source)
        except Exception as error:  # Python, which jinja compiles to, has bounds of its own
            raise FailedPrecondition(
                f"the model's chat template cannot be compiled ({error}); send text instead"
            ) from error


def _clean(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise InvalidArgument("messages", "there must be at least one")
    cleaned = []
    for position, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidArgument("messages", f"message {position} has no role")
        cleaned.append({key: value for key, value in message.items() if value is not None})
    return cleaned


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


@jinja2.pass_environment
def _to_json(  # noqa: PLR0917 (as templates call it)
    environment: BoundedEnvironment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja's own filter escapes for HTML."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return environment.concat(encoder.iterencode(value))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks a model's words; they stay as they are."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
