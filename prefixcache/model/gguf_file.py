"""Reading a GGUF file: its metadata, its table of tensors, and their bytes.

Owns the file format and trusts nothing in it: every count and offset is checked against the length
of the file before it is used. Knows nothing of models; never writes.

The table is walked here and not by gguf.GGUFReader, which makes one numpy array a string (2.3 s for
SmolLM2's vocabulary against 0.1 s here) and loops over whatever count a broken file claims. Types,
block sizes and dequantisation are gguf's.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import numpy.typing as npt
import torch

from prefixcache.errors import ModelError

READABLE_TYPES = frozenset(
    (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    )
)
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {  # GGUF value type -> struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. `shape` is in torch's order, `offset` from the file's start."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last dimension)."""
        return self.num_bytes // math.prod(self.shape[:-1])


class GgufFile:
    """A memory-mapped GGUF file. `metadata` holds Python values, arrays as lists.

    Raises ModelError, naming the file and the field or tensor, for anything that is not as it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        cursor = _Cursor(self._map, path)
        tensor_count, field_count = cursor.header()
        self.metadata: Mapping[str, Any] = cursor.metadata(field_count)
        self.tensors: Mapping[str, GgufTensor] = _place(
            cursor.tensor_table(tensor_count), cursor, self.metadata.get("general.alignment", 32)
        )

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 [rows, bytes a row], a read-only view of the file."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return flat.reshape(-1, tensor.row_bytes)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as float32 where it is quantised, in its own dtype where it is not.

        Dequantisation is `gguf.quants.dequantize`: for Q4_1, float32(d) * q + float32(m) with both
        operations rounded to float32.
        """
        info = self.tensors[name]
        data = self.bytes_of(name)
        dtype = _FLOAT_DTYPES.get(info.type_name)
        if dtype is not None:
            return torch.from_numpy(data.copy()).view(dtype).reshape(info.shape)
        try:
            kind = gguf.GGMLQuantizationType[info.type_name]
            with np.errstate(all="ignore"):  # a scale may be anything
                values = gguf.quants.dequantize(data, kind)
        except Exception as error:
            raise ModelError(
                f"{self.path}: tensor {name} ({info.type_name}) cannot be dequantised: {error}"
            ) from error
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(info.shape)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _place(table: list[GgufTensor], cursor: "_Cursor", alignment: Any) -> dict[str, GgufTensor]:
    """Turn offsets relative to the data section into offsets in the file, and check them."""
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.position // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    for tensor in table:
        offset = start + tensor.offset
        if offset + tensor.num_bytes > cursor.length:
            cursor.fail(
                f"tensor {tensor.name} should end at byte {offset + tensor.num_bytes}, the file "
                f"has {cursor.length}: it is truncated"
            )
        if tensor.name in placed:
            cursor.fail(f"tensor {tensor.name} is listed twice")
        placed[tensor.name] = GgufTensor(
            tensor.name, tensor.type_name, tensor.shape, offset, tensor.num_bytes
        )
    return placed


class _Cursor:
    """A reading position in the mapped file that refuses to pass its end."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer = buffer
        self._path = path
        self.length = len(buffer)
        self.position = 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self._path}: {problem}")

    def header(self) -> tuple[int, int]:
        """(number of tensors, number of metadata fields)."""
        if self._buffer[:4] != b"GGUF":
            self.fail("is not a GGUF file (it does not start with the letters GGUF)")
        self.position = 4
        version = self._scalar("<I", "the version")
        if version not in _VERSIONS:
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            self.fail(f"has GGUF version {version}{hint}; versions {_VERSIONS} can be read")
        return self._scalar("<Q", "the tensor count"), self._scalar("<Q", "the field count")

    def metadata(self, count: int) -> dict[str, Any]:
        """All fields; each takes at least 13 bytes, which bounds what a false count can ask for."""
        self._check_count(count, 13, "metadata fields")
        fields: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a metadata key")
            if key in fields:
                self.fail(f"field {key} is listed twice")
            fields[key] = self._value(self._scalar("<I", key), key)
        return fields

    def tensor_table(self, count: int) -> list[GgufTensor]:
        """The table with offsets still relative to the data section."""
        self._check_count(count, 24, "tensors")
        return [self._tensor() for _ in range(count)]

    def _tensor(self) -> GgufTensor:
        name = self._string("a tensor name")
        dimensions = self._scalar("<I", name)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self.fail(f"tensor {name} has {dimensions} dimensions")
        sizes = [self._scalar("<Q", name) for _ in range(dimensions)]
        kind = self._scalar("<I", name)
        offset = self._scalar("<Q", name)
        try:
            quantisation = gguf.GGMLQuantizationType(kind)
        except ValueError:
            self.fail(f"tensor {name} has the unknown type {kind}")
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
        if min(sizes) < 1 or sizes[0] % block:
            self.fail(f"tensor {name} of type {quantisation.name} has the impossible size {sizes}")
        shape = tuple(reversed(sizes))  # ggml lists the fastest-moving dimension first
        num_bytes = math.prod(sizes) // block * block_bytes
        return GgufTensor(name, quantisation.name, shape, offset, num_bytes)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self.fail(f"field {key} has the unknown type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self._scalar("<I", key), self._scalar("<Q", key)
        if kind == _STRING:
            return self._strings(count, key)
        if kind not in _SCALARS:
            self.fail(f"field {key} is an array of type {kind}, which is not supported")
        dtype = np.dtype(_SCALARS[kind])
        self._check_count(count, dtype.itemsize, f"elements in field {key}")
        values = np.frombuffer(self._buffer, dtype, count=count, offset=self.position)
        self.position += count * dtype.itemsize
        return list(values.tolist())

    def _strings(self, count: int, key: str) -> list[str]:
        """An array of strings, the hot loop of a load: a vocabulary has 10^5 of them."""
        self._check_count(count, 8, f"strings in field {key}")
        buffer, position, length = self._buffer, self.position, struct.Struct("<Q")
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length.unpack_from(buffer, position)[0]
                if position > self.length:
                    self.fail(f"field {key} runs past the end of the file: it is truncated")
                strings.append(buffer[start:position].decode())
        except struct.error:
            self.fail(f"field {key} runs past the end of the file: it is truncated")
        except UnicodeDecodeError as error:
            self.fail(f"field {key}, string {len(strings)} is not UTF-8: {error}")
        self.position = position
        return strings

    def _string(self, what: str) -> str:
        size = self._scalar("<Q", what)
        self._check_count(size, 1, f"bytes in {what}")
        data = self._buffer[self.position : self.position + size]
        self.position += size
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            return self.fail(f"{what} is not UTF-8: {error}")

    def _scalar(self, form: str, what: str) -> Any:
        try:
            (value,) = struct.unpack_from(form, self._buffer, self.position)
        except struct.error:
            self.fail(f"ends inside {what}: it is truncated")
        self.position += struct.calcsize(form)
        return value

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything is sized by it."""
        left = self.length - self.position
        if count * least_bytes > left:
            self.fail(f"claims {count} {what}, but only {left} bytes are left: truncated or broken")
