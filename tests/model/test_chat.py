"""Rendered chats against transformers, and how templates fail."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from prefixcache.errors import FailedPrecondition, InvalidArgument
from prefixcache.model import chat_sandbox
from prefixcache.model.chat import ChatTemplate
from prefixcache.model.gguf_file import GgufFile
from prefixcache.model.gguf_tokenizer import tokenizer_from_gguf
from prefixcache.model.tokenizer import Tokenizer, tokenizer_from_path
from tests.model.checkpoints import default_model_path, write_tokenizer

HI = [{"role": "user", "content": "Hi"}]
CHATS: list[list[dict[str, Any]]] = [
    HI,
    [{"role": "system", "content": "Be brief."}, *HI],
    [*HI, {"role": "assistant", "content": "Hello 🙂"}, {"role": "user", "content": "<b>&amp;\n"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "{{ 1 + 1 }} {% raw %}"}],
]
# One template that uses everything that Hugging Face's environment offers.
RICH = """{{ bos_token }}{%- set ns = namespace(count=0) -%}
{% if tools %}
{{ tools | tojson(indent=2) }} {{ tools | tojson }}
{% endif %}
{% for message in messages %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if message.role not in ['user', 'assistant'] %}
        {{ raise_exception('unknown role ' + message.role) }}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
{{ message.role | upper }}: {% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {% if message.name is defined %} ({{ message.name }}){% endif %}
{{ eos_token }}
{% endfor %}
{{ ns.count }} {{ strftime_now('%Y') }} {{ none_there is defined }}
{%- if add_generation_prompt %}ASSISTANT:{% endif -%}
"""
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": "<1>"}}}]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(default_model_path()))


@pytest.fixture(scope="module")
def reference() -> Any:
    path = default_model_path()
    return transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("prompt", [True, False])
def test_the_default_model_renders_as_transformers(
    smollm2: Tokenizer, reference: Any, messages: list[dict[str, Any]], prompt: bool
) -> None:
    ours = smollm2.apply_chat_template(messages, add_generation_prompt=prompt)
    theirs = reference.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    assert ours == theirs
    ids = reference.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
    assert smollm2.encode(ours, add_special_tokens=False) == ids


def _both(directory: Path, template: Any, messages: Any, **options: Any) -> tuple[str, str]:
    write_tokenizer(directory, chat_template=template)
    ours = tokenizer_from_path(directory).apply_chat_template(messages, **options)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    options.setdefault("add_generation_prompt", True)
    return ours, theirs.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_everything_that_templates_use_renders_as_transformers(tmp_path: Path, tools: Any) -> None:
    messages = [
        {"role": "user", "content": "  eins ", "name": "Ü"},
        {"role": "skip", "content": "x"},
        {"role": "assistant", "content": "zwei", "name": None},
        {"role": "stop", "content": "x"},
        {"role": "user", "content": "never"},
    ]
    ours, theirs = _both(tmp_path, RICH, messages, tools=tools)
    assert ours == theirs
    assert ours.endswith("False" + "ASSISTANT:")


def test_named_templates_are_chosen_as_transformers_chooses(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert _both(tmp_path, named, HI) == ("plain", "plain")
    assert _both(tmp_path, named, HI, tools=TOOLS) == ("tools", "tools")


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert _both(tmp_path, "from the configuration", HI) == ("from the file",) * 2
    assert _both(tmp_path, "from the configuration", HI, tools=TOOLS) == ("with tools",) * 2


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ([{"content": "no role"}], "message 0 has no role"),
        ([*HI, {"role": 3, "content": "x"}], "message 1 has no role"),
        ([{"role": "judge", "content": "x"}], "unknown role judge"),
        ([{"role": "user", "content": "\ud83d"}], "not Unicode"),
        ([{"role": "user"}], "no attribute 'content'"),
        ([{"role": "user", "content": 3}], "refuses"),
    ],
)
def test_messages_that_a_template_cannot_take_are_the_callers_fault(
    messages: Any, message: str
) -> None:
    template = ChatTemplate(RICH.replace("| trim }}", "+ '' }}"))
    with pytest.raises(InvalidArgument, match=message) as caught:
        template.render(messages)
    assert caught.value.field == "messages"


def test_a_template_with_a_syntax_error_is_the_models_fault() -> None:
    with pytest.raises(FailedPrecondition, match="cannot be compiled"):
        ChatTemplate("{% for %}").render(HI)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ '%s' | format(cycler.__init__.__globals__.os.popen('id').read()) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(InvalidArgument):
        ChatTemplate(attack).render(HI)


def test_messages_are_not_changed_by_rendering() -> None:
    messages = [{"role": "user", "content": "Hi", "name": None}]
    before = json.dumps(messages)
    ChatTemplate(RICH).render(messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "endless",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
        "{% for i in range(99999) if i > range(99999) | sum %}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_stopped(
    endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take one of the threads that tokenize for everybody."""
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(InvalidArgument):
        ChatTemplate(endless).render(HI)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "large",
    [
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% macro m() %}{% for i in range(99999) %}{{ i|center(9999) }}{% endfor %}{% endmacro %}"
        "{{ m() }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x' | indent(10000000000) }}",
        "{{ ['x'] | map('center', 10000000000) | list }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ ('x' * 9999) | replace('x', 'y' * 9999) }}",
        "{{ messages | tojson(indent=10000000000) }}",
        "{{ 5 | round(-10000000000) }}",
        "{{ range(99999) | join('x' * 9999) }}",
    ],
)
def test_a_template_cannot_make_something_huge(large: str) -> None:
    with pytest.raises(InvalidArgument, match=r"too large|too much text"):
        ChatTemplate(large).render(HI)


@pytest.mark.parametrize(
    "kept", ["('x' * 9999)[1:]", "[" + "0, " * 9999 + "]", "{'a': 1} | string"]
)
def test_what_a_template_keeps_on_the_way_is_bounded_too(kept: str) -> None:
    keeps = (
        f"{{% for j in range(9) %}}{{% for i in range(99999) %}}{{% set ns.l = [ns.l, {kept}] %}}"
    )
    keeps += "{% endfor %}{% endfor %}"
    with pytest.raises(InvalidArgument, match=r"too much text|2 seconds"):
        ChatTemplate("{% set ns = namespace(l=0) %}" + keeps).render(HI)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for a in 'x' %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("x" * (1 << 20) + "x", "1048577 characters"),
    ],
)
def test_a_template_that_no_one_can_compile_is_the_models_fault(source: str, says: str) -> None:
    with pytest.raises(FailedPrecondition, match=says):
        ChatTemplate(source).render(HI)


def test_long_chats_are_no_huge_values() -> None:
    """A million characters, through what real templates do with each message."""
    template = ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '\n' }}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') | tojson }}{% endfor %}"
        "{{ messages | tojson(indent=4) }}"
    )
    chat = [{"role": "user", "content": f"{at} <b>\n" + "word " * 200} for at in range(1000)]
    assert len(template.render(chat)) > 3_000_000


@pytest.mark.parametrize(
    "reads", ["{% include 'PATH' %}", "{% extends 'PATH' %}", "{% import 'PATH' as secrets %}"]
)
def test_a_template_reads_no_file(reads: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret")
    with pytest.raises(InvalidArgument, match="no loader"):
        ChatTemplate(reads.replace("PATH", str(tmp_path / "secret"))).render(HI)


def test_each_rendering_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 0.3)
    template = ChatTemplate("{% for message in messages %}{{ message.content * 2 }}{% endfor %}")
    assert template.render(HI) == "HiHi"
    time.sleep(0.4)
    assert template.render(HI) == "HiHi"
