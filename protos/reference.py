"""The API reference, docs/api-reference.md, from the comments of the proto. Pure."""

import re
from collections.abc import Iterable, Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)

Path = tuple[int, ...]

_MESSAGE, _ENUM, _SERVICE = 4, 5, 6  # field numbers of FileDescriptorProto
_FIELD, _NESTED, _NESTED_ENUM, _ONEOF = 2, 3, 4, 8  # of DescriptorProto
_SYNTAX = 12
_VALUE = _METHOD = 2  # of EnumDescriptorProto, of ServiceDescriptorProto

_HEAD = """# API reference

Generated from the comments of
[the proto](../protos/prefixcache_service/v1/prefixcache.proto) by `make proto`; change those.
[api.md](api.md) says how the parts are used, and what is promised of later versions.
"""


def render(file: FileDescriptorProto) -> str:
    """The whole page. `file` must have its source info."""
    comments = {tuple(location.path): location for location in file.source_code_info.location}
    page = _Page(file, {path: one.leading_comments for path, one in comments.items()})
    opening = comments[(_SYNTAX,)]
    head = [*opening.leading_detached_comments, opening.leading_comments]
    contract = "\n\n".join(_lines(comment) for comment in head if comment)
    text = "\n".join([_HEAD, f"```text\n{contract}\n```\n", *page.lines()])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


class _Page:
    def __init__(self, file: FileDescriptorProto, comments: dict[Path, str]) -> None:
        self._file = file
        self._comments = comments

    def lines(self) -> Iterator[str]:
        for index, service in enumerate(self._file.service):
            yield f"## {self._file.package}.{service.name}\n"
            yield self._text((_SERVICE, index))
            for number, method in enumerate(service.method):
                yield f"### {method.name}\n"
                yield f"`{_signature(method)}`\n"
                yield self._text((_SERVICE, index, _METHOD, number))
        yield "## Messages\n"
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, message.name, (_MESSAGE, index))
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, enum.name, (_ENUM, index))

    def _message(self, message: DescriptorProto, name: str, path: Path) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield f"### {name}\n"
        yield self._text(path)
        for index, oneof in enumerate(message.oneof_decl):
            members = [
                f"`{field.name}`"
                for field in message.field
                if field.HasField("oneof_index")
                and field.oneof_index == index
                and not field.proto3_optional
            ]
            if members:
                said = _one_line(self._comments.get((*path, _ONEOF, index), ""))
                yield f"At most one of {', '.join(members)} (`{oneof.name}`). {said}".rstrip()
                yield ""
        if message.field:
            entries = {nested.name: nested for nested in message.nested_type}
            rows = (
                (field.name, field.number, _type(field, entries), (*path, _FIELD, index))
                for index, field in enumerate(message.field)
            )
            yield from self._table(("field", "number", "type"), rows)
        else:
            yield "No fields.\n"
        for index, nested in enumerate(message.nested_type):
            yield from self._message(nested, f"{name}.{nested.name}", (*path, _NESTED, index))
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, f"{name}.{enum.name}", (*path, _NESTED_ENUM, index))

    def _enum(self, enum: EnumDescriptorProto, name: str, path: Path) -> Iterator[str]:
        yield f"### {name}\n"
        yield self._text(path)
        rows = (
            (value.name, value.number, (*path, _VALUE, index))
            for index, value in enumerate(enum.value)
        )
        yield from self._table(("value", "number"), rows)

    def _table(self, names: Iterable[str], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
        """Rows of cells, the last one the path whose comment is the text."""
        heads = [*names, ""]
        yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
        for name, *cells, path in rows:
            said = _one_line(self._comments.get(path, "")).replace("|", "\\|")
            yield f"| {' | '.join([f'`{name}`', *map(str, cells), said])} |"
        yield ""

    def _text(self, path: Path) -> str:
        return _lines(self._comments.get(path, "")) + "\n"


def _lines(comment: str) -> str:
    """A comment without the space behind each `//`."""
    return "\n".join(line.removeprefix(" ") for line in comment.rstrip().split("\n"))


def _one_line(comment: str) -> str:
    return " ".join(comment.split())


def _signature(method: MethodDescriptorProto) -> str:
    answer = method.output_type.rpartition(".")[2]
    stream = "stream " if method.server_streaming else ""
    return f"{method.name}({method.input_type.rpartition('.')[2]}) → {stream}{answer}"


def _type(field: FieldDescriptorProto, nested: dict[str, DescriptorProto]) -> str:
    if field.type_name:
        name = field.type_name.rpartition(".")[2]
        entry = nested.get(name)
        if entry is not None and entry.options.map_entry:
            key, value = (_type(part, {}) for part in entry.field)
            return f"map<{key}, {value}>"
        plain = f"[{name}](#{_anchor(field.type_name)})"
    else:
        plain = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {plain}"
    return f"optional {plain}" if field.proto3_optional else plain


def _anchor(type_name: str) -> str:
    """GitHub's anchor of a heading: of the name below the package."""
    return type_name.removeprefix(".prefixcache.v1.").lower().replace(".", "")
