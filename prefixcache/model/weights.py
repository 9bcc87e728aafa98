"""What the decoder may ask of a checkpoint's tensors, and the check that they are all there.

Owns the list of tensors that a configuration implies. Never reads a file itself: that is
`safetensors_files.py` and `gguf_weights.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.errors import ModelError
from prefixcache.model.config import ModelConfig

RawTensor = tuple[str, npt.NDArray[np.uint8], tuple[int, ...]]


class Weights(ABC):
    """The tensors of a checkpoint under Hugging Face names, read one at a time.

    Nothing is read before `get` or `raw` is called, and nothing is kept afterwards, so the memory
    used is what the caller holds. Files are mapped and must not change while the model is open.
    """

    @abstractmethod
    def names(self) -> frozenset[str]:
        """All tensor names, such as `model.layers.0.self_attn.q_proj.weight`."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out_features, in_features] for linear layers. Reads no data."""

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """A CPU tensor: float32 where the file is quantised, else in the file's dtype.

        Treat it as read-only: it may be a view of the mapped file, which costs no memory.

        Raises ModelError if there is no such tensor or it cannot be read.
        """

    @abstractmethod
    def storage_type(self, name: str) -> str:
        """How the file stores it: `F32`, `F16`, `BF16`, or a ggml type such as `Q4_1`."""

    @abstractmethod
    def readable_types(self) -> frozenset[str]:
        """The storage types that `get` can read."""

    @abstractmethod
    def source(self, name: str) -> str:
        """The file (and the name inside it) that a tensor comes from, for messages."""

    def raw(self, name: str) -> RawTensor | None:
        """The still quantised bytes of a GGUF tensor, or None where the file is not quantised.

        Returns (ggml type name, uint8 [out_features, bytes a row], (out_features, in_features)),
        rows in the same order as `get(name)`. Kernels that consume the blocks directly read these.
        """
        return None


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every (name, shape) that a decoder of this configuration reads."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = [
        ("self_attn.q_proj", query, hidden, config.attention_bias),
        ("self_attn.k_proj", key, hidden, config.attention_bias),
        ("self_attn.v_proj", key, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, query, config.attention_output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    for name, rows, columns, bias in linears:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


def check_shapes(config: ModelConfig, weights: Weights) -> None:
    """Check that the checkpoint holds what the configuration implies, and nothing that we'd ignore.

    Raises ModelError naming the tensor: missing, of another shape, of an unreadable type, or
    present though this decoder has no place for it (a bias ignored in silence
    would give wrong answers).
    """
    expected: set[str] = set()
    names = weights.names()
    for name, shape in expected_tensors(config):
        if name not in names:
            raise ModelError(f"tensor {name} is missing; its shape should be {shape}")
        if weights.shape(name) != shape:
            raise ModelError(
                f"tensor {name} has shape {weights.shape(name)}, the configuration implies {shape} "
                f"({weights.source(name)})"
            )
        if weights.storage_type(name) not in weights.readable_types():
            raise ModelError(
                f"tensor {name} is stored as {weights.storage_type(name)}, which cannot be read "
                f"({weights.source(name)}); readable: {', '.join(sorted(weights.readable_types()))}"
            )
        expected.add(name)
    _refuse_unknown(config, weights, names - expected)


def _refuse_unknown(config: ModelConfig, weights: Weights, extra: Iterable[str]) -> None:
    for name in sorted(extra):
        # Old checkpoints store the rotary frequencies; tied ones may store the output layer twice.
        if name.endswith(".rotary_emb.inv_freq"):
            continue
        if name == "lm_head.weight" and config.tie_embeddings:
            continue
        raise ModelError(
            f"tensor {name} ({weights.source(name)}) has no place in a {config.architecture} "
            f"decoder with {config.num_layers} layers as configured"
        )
