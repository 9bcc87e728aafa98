"""The tensors of a directory of safetensors files, single or sharded by an index.

Owns finding the shards and reading from them. Headers are checked by the safetensors library
(bounded size, offsets inside the file) before anything is allocated.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from prefixcache.errors import ModelError
from prefixcache.model.hf_config import read_json
from prefixcache.model.weights import Weights

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_READABLE = frozenset({"F32", "F16", "BF16"})
_Result = TypeVar("_Result")


class SafetensorsWeights(Weights):
    """`Weights` over one or several safetensors files, memory-mapped by the library."""

    def __init__(self, directory: Path) -> None:
        self.files, wanted = _shards(directory)
        self._shard_of: dict[str, tuple[Path, Any]] = {}
        for path in self.files:
            shard = _guarded(path, partial(safe_open, path, framework="pt"))
            for name in _guarded(path, shard.keys):
                if wanted is None or wanted.get(name) == path.name:
                    self._shard_of[name] = (path, shard)
        for name in sorted((wanted or {}).keys() - self._shard_of.keys()):
            raise ModelError(
                f"{directory / _INDEX}: tensor {name} is not in {(wanted or {})[name]}"
            )

    def names(self) -> frozenset[str]:  # noqa: D102 (see Weights)
        return frozenset(self._shard_of)

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        path, shard = self._find(name)
        return _guarded(path, lambda: tuple(shard.get_slice(name).get_shape()))

    def storage_type(self, name: str) -> str:  # noqa: D102
        path, shard = self._find(name)
        return _guarded(path, lambda: str(shard.get_slice(name).get_dtype()))

    def readable_types(self) -> frozenset[str]:  # noqa: D102
        return _READABLE

    def source(self, name: str) -> str:  # noqa: D102
        return self._find(name)[0].name

    def get(self, name: str) -> torch.Tensor:  # noqa: D102
        path, shard = self._find(name)
        tensor: torch.Tensor = _guarded(path, lambda: shard.get_tensor(name))
        return tensor

    def _find(self, name: str) -> tuple[Path, Any]:
        try:
            return self._shard_of[name]
        except KeyError:
            raise ModelError(f"{self.files[0].parent}: there is no tensor {name}") from None


def _shards(directory: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """(files in a fixed order, file of each tensor where an index says so)."""
    index = directory / _INDEX
    if index.exists():
        wanted = read_json(index).get("weight_map")
        if not isinstance(wanted, dict) or not all(isinstance(v, str) for v in wanted.values()):
            raise ModelError(f"{index}: field weight_map is not an object of file names")
        names = sorted(set(wanted.values()))
        for name in names:
            if Path(name).name != name:
                raise ModelError(
                    f"{index}: weight_map names {name!r}, which is not a file beside it"
                )
            if not (directory / name).is_file():
                raise ModelError(f"{directory / name}: is missing, but {_INDEX} lists it")
        return [directory / name for name in names], wanted
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE], None
    raise ModelError(f"{directory}: holds neither {_SINGLE} nor {_INDEX}")


def _guarded(path: Path, action: Callable[[], _Result]) -> _Result:
    """Run a call into the library; its errors become ours and name the file."""
    try:
        return action()
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
