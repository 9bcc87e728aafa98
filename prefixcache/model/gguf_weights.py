"""The tensors of a Llama-shaped GGUF file under Hugging Face names, rows in Hugging Face order.

Owns the name mapping and the undoing of llama.cpp's row permutation. Never parses the file.
"""

import re

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.errors import ModelError
from prefixcache.model.config import ModelConfig
from prefixcache.model.gguf_file import READABLE_TYPES, GgufFile
from prefixcache.model.weights import RawTensor, Weights

_UNQUANTISED = frozenset({"F32", "F16", "BF16"})
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Rotary factors become part of the configuration; see gguf_config.py.
_CONFIGURATION = frozenset({"rope_freqs.weight"})


class GgufWeights(Weights):
    """`Weights` over one GGUF file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._gguf_names = {
            hugging_face_name(name): name for name in file.tensors if name not in _CONFIGURATION
        }

    def names(self) -> frozenset[str]:  # noqa: D102 (see Weights)
        return frozenset(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        return self._file.tensors[self._stored(name)].shape

    def storage_type(self, name: str) -> str:  # noqa: D102
        return self._file.tensors[self._stored(name)].type_name

    def readable_types(self) -> frozenset[str]:  # noqa: D102
        return READABLE_TYPES

    def source(self, name: str) -> str:  # noqa: D102
        return f"{self._file.path.name}: {self._stored(name)}"

    def get(self, name: str) -> torch.Tensor:  # noqa: D102
        tensor = self._file.tensor(self._stored(name))
        order = self._row_order(name)
        return tensor if order is None else tensor[torch.from_numpy(order)]

    def raw(self, name: str) -> RawTensor | None:  # noqa: D102
        info = self._file.tensors[self._stored(name)]
        if info.type_name in _UNQUANTISED:
            return None
        data = self._file.bytes_of(info.name)
        order = self._row_order(name)
        return info.type_name, data if order is None else data[order], info.shape

    def _stored(self, name: str) -> str:
        try:
            return self._gguf_names[name]
        except KeyError:
            raise ModelError(f"{self._file.path}: there is no tensor for {name}") from None

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """GGUF row of each Hugging Face row of q_proj and k_proj; None where they agree.

        Files of the llama architecture hold the two halves of each head interleaved, as llama.cpp's
        rotation wants them: row (head, d, half) there is row (head, half, d) here.
        """
        if self._config.architecture != "llama":
            return None
        if ".q_proj." in name:
            heads = self._config.num_heads
        elif ".k_proj." in name:
            heads = self._config.num_kv_heads
        else:
            return None
        rows = self.shape(name)[0]
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; others stay."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, suffix = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{suffix}" if stem in _TOP else name
    return f"model.layers.{layer}.{_IN_LAYER[stem]}.{suffix}" if stem in _IN_LAYER else name
