"""A model's tokenizer as a zip archive, so that a gateway on another machine has the same one."""

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

CHUNK_BYTES = 64 * 1024


def pack(files: Mapping[str, str]) -> bytes:
    """An archive of these files, by name; the same bytes for the same files."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(files.items()):
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
    return data.getvalue()


def chunks(archive: bytes) -> Iterator[Any]:
    """The messages that carry an archive; the last one has its SHA-256."""
    for start in range(0, len(archive), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(archive)
        yield common.GetTokenizerChunk(
            data=archive[start : start + CHUNK_BYTES],
            sha256=hashlib.sha256(archive).hexdigest() if last else "",
        )
