"""The shape of a decoder: what config.json or GGUF metadata say, in one frozen class."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the original length.

    kind: "default", "linear", "llama3", "yarn" or "dynamic" ("dynamic" is served up to
        `original_max_position` only: beyond it, it would change keys already cached).
    """

    kind: Literal["default", "linear", "llama3", "yarn", "dynamic"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama shape: Llama, Mistral, SmolLM2, Qwen2, Qwen3 (dense).

    vocab_size: rows of the output layer. tokenizer ids may be fewer; ids beyond are never sampled.
    sliding_window: tokens that a query sees, itself included; None sees all. sliding_layers says
        for which layers it holds.
    eos_token_ids: tokens that end an output.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
