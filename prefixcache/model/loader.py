"""Loading a model: from what the user names to a configuration, weights and a tokenizer.

Owns the choice of format and of place (the default model, a directory, a GGUF file, a hub id),
and the checks that must fail before serving starts. Keeps no tensors: `Weights` reads on demand.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from prefixcache.config import DEFAULT_MODEL
from prefixcache.errors import ModelError
from prefixcache.model.config import ModelConfig
from prefixcache.model.default_model import find_default_model
from prefixcache.model.gguf_config import config_from_gguf
from prefixcache.model.gguf_file import GgufFile
from prefixcache.model.gguf_tokenizer import tokenizer_from_gguf
from prefixcache.model.gguf_weights import GgufWeights
from prefixcache.model.hf_config import config_from_directory
from prefixcache.model.safetensors_files import SafetensorsWeights
from prefixcache.model.tokenizer import Tokenizer, tokenizer_from_path
from prefixcache.model.weights import Weights, check_shapes

__all__ = ["Checkpoint", "Weights", "check_shapes", "load_checkpoint"]

Progress = Callable[[str, int, int], None]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TOKENIZER_FILES = ["*.json", "*.jinja"]
_HUB_FILES = ["*.safetensors", *_HUB_TOKENIZER_FILES]
_HUB_IGNORED = ["consolidated*", "*/*.safetensors", "*/*.json"]  # copies in another layout
_SAMPLES, _SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True)
class Checkpoint:
    """A model that has been opened and checked.

    fingerprint: 16 bytes that identify the weights, the same in every process and at every path.
        Two models that differ must never share a cache namespace, so it covers a sample of the data
        and not only the headers, which are equal for two fine-tunes of one model.
    name: what to show as the served model's name.
    """

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    fingerprint: bytes
    name: str


def load_checkpoint(
    model: str, tokenizer: str | None = None, *, progress: Progress | None = None
) -> Checkpoint:
    """Open a model and check that all of it is there.

    model: "smollm2" (the default model), a .gguf file, a directory with config.json and safetensors
        (or with one .gguf file), or a hub id such as "owner/name".
    tokenizer: a directory, tokenizer.json, .gguf file or hub id, if not the model's own.
    progress: called with (step, done, total).
    Raises ModelError naming the file, tensor or field that is missing, broken or unsupported.
    """
    report = progress or (lambda step, done, total: None)
    report("find model", 0, 4)
    path = _resolve(model, _HUB_FILES)
    report("open weights", 1, 4)
    config, weights, files = _open(path)
    ends = tuple(token for token in config.eos_token_ids if token < config.vocab_size)
    config = replace(config, eos_token_ids=ends)
    report("check shapes", 2, 4)
    check_shapes(config, weights)
    fingerprint = _fingerprint(config, files)
    report("load tokenizer", 3, 4)
    source = path if tokenizer is None else _resolve(tokenizer, _HUB_TOKENIZER_FILES)
    vocabulary = _load_tokenizer(source, config)
    report("load tokenizer", 4, 4)
    return Checkpoint(
        config=replace(config, eos_token_ids=vocabulary.eos_token_ids),
        weights=weights,
        tokenizer=vocabulary,
        fingerprint=fingerprint,
        name=_name(model, path),
    )


def _resolve(model: str, hub_files: list[str]) -> Path:
    """A directory or file on this machine."""
    if model == DEFAULT_MODEL:
        path = find_default_model()
        if path is None:
            raise ModelError("the default model is not here yet: run `prefixcache pull`")
        return path
    path = Path(model).expanduser()
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        return ggufs[0] if len(ggufs) == 1 and not (path / "config.json").exists() else path
    if path.is_file():
        return path
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, hub_files)
    raise ModelError(
        f"{model}: there is no such file or directory, and it is neither {DEFAULT_MODEL!r} nor the "
        "hub id of a model (owner/name)"
    )


def _from_hub(model: str, files: list[str]) -> Path:
    """The snapshot in the hub's local cache, downloaded first if need be."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (0.3 s that other sources save)

    try:
        return Path(snapshot_download(model, allow_patterns=files, ignore_patterns=_HUB_IGNORED))
    except Exception as error:  # many kinds: network, authorisation, unknown repository, disk
        reason = " ".join(str(error).split())  # errors are one line
        raise ModelError(f"{model}: cannot be fetched from the hub: {reason}") from error


def _open(path: Path) -> tuple[ModelConfig, Weights, list[Path]]:
    if path.is_dir():
        config = config_from_directory(path)
        weights = SafetensorsWeights(path)
        return config, weights, weights.files
    if path.suffix == ".gguf":
        file = GgufFile(path)
        config = config_from_gguf(file)
        return config, GgufWeights(file, config), [path]
    raise ModelError(f"{path}: is neither a directory nor a .gguf file")


def _load_tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    if path.suffix == ".gguf":
        tokenizer = tokenizer_from_gguf(GgufFile(path), eos_token_ids=config.eos_token_ids)
    else:
        tokenizer = tokenizer_from_path(path, eos_token_ids=config.eos_token_ids)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model's output layer only "
            f"{config.vocab_size} rows"
        )
    return tokenizer


def _fingerprint(config: ModelConfig, files: Iterable[Path]) -> bytes:
    """Hash of the configuration and, for each file, its size and evenly spaced pieces of it."""
    digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            step = max(size // _SAMPLES, _SAMPLE_BYTES)
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _name(model: str, path: Path) -> str:
    if model == DEFAULT_MODEL or (_HUB_ID.fullmatch(model) and not Path(model).exists()):
        return model
    return path.stem if path.suffix == ".gguf" else path.resolve().name
