"""The decoder: Llama, Mistral, SmolLM2, Qwen2 and Qwen3 (dense) from one set of layers.

Owns the weights as the kernels want them and the order of operations. Arithmetic is the kernels';
which block holds what is the caller's (`StepInput`).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from prefixcache.errors import ModelError
from prefixcache.model.attention import StepInput, check_step, plan_step
from prefixcache.model.config import ModelConfig
from prefixcache.model.kv_cache import KVCache
from prefixcache.model.rope import rope_table
from prefixcache.model.weights import Weights
from prefixcache_kernels import (
    Heads,
    Kernels,
    Layer,
    Linear,
    StepWork,
    Weight,
    select_kernels,
)


class HasWeights(Protocol):
    """What a decoder reads of a checkpoint."""

    @property
    def config(self) -> ModelConfig:
        """The decoder's shape."""
        ...

    @property
    def weights(self) -> Weights:
        """Its tensors under Hugging Face names."""
        ...


class Decoder:
    """A decoder ready to run on one device; `from_checkpoint` makes one."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        embedding: Callable[[Tensor], Tensor],
        layers: tuple[Layer, ...],
        final_norm: Tensor,
        lm_head: Linear,
        rope: Tensor,
    ) -> None:
        """Take weights as they are; rope: float32 [max_model_len, head_dim] of `rope_table`."""
        self.config = config
        self.kernels = kernels
        self.max_model_len = len(rope)
        self._embedding = embedding
        self._layers = kernels.layers(layers, final_norm, config.rms_norm_eps)
        self._lm_head = lm_head
        self.rope = rope
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.windows = {layer.window for layer in layers}

    @property
    def device(self) -> torch.device:
        """Where the decoder computes."""
        return self.rope.device

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: HasWeights,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        backend: str = "auto",
        batch_invariant: bool = False,
        activation_quantization: str | None = None,
    ) -> "Decoder":
        """Read the weights and lay them out for the kernels.

        Args:
            checkpoint: of `load_checkpoint`; one tensor is read at a time.
            device, dtype: where and in what the decoder computes.
            max_model_len: longest sequence in tokens; sizes the rotary table.
            backend, batch_invariant, activation_quantization: of
                `prefixcache_kernels.select_kernels`.

        Raises:
            ModelError: a length that the rope scaling does not serve, or a broken tensor.
            ValueError: the backend is unknown, or does not work here.
        """
        config = checkpoint.config
        if config.num_heads % config.num_kv_heads:
            raise ModelError(
                f"num_heads {config.num_heads} is no multiple of num_kv_heads {config.num_kv_heads}"
            )
        rope = rope_table(config, max_model_len).to(device)
        kernels = select_kernels(
            backend,
            device,
            dtype,
            batch_invariant=batch_invariant,
            activation_quantization=activation_quantization,
        )
        reader = _Reader(checkpoint.weights, kernels, device, dtype)
        tied = config.tie_embeddings
        lm_head = reader.linear(["model.embed_tokens" if tied else "lm_head"], bias=False)
        return cls(
            config,
            kernels,
            embedding=reader.embedding("model.embed_tokens.weight", lm_head if tied else None),
            layers=tuple(_read_layer(reader, config, i) for i in range(config.num_layers)),
            final_norm=reader.tensor("model.norm.weight"),
            lm_head=lm_head,
            rope=rope,
        )

    @torch.inference_mode()
    def forward(self, step: StepInput, kv_cache: KVCache) -> Tensor:
        """Run a step: write its KV, and return the logits of `step.logits_rows`.

        Returns:
            float32 [R, vocab_size]. On the CPU a row's bits depend on its tokens alone.

        Raises:
            ValueError: a field of `step` has a wrong shape or range; nothing was written.
        """
        rows = torch.from_numpy(step.logits_rows).to(self.device, torch.int64)
        return self.logits(self._run(step, kv_cache, rows))

    @torch.inference_mode()
    def hidden(self, step: StepInput, kv_cache: KVCache) -> Tensor:
        """Run a step and return its last hidden states after the final norm, [T, hidden_size]."""
        return self._run(step, kv_cache, None)

    def _run(self, step: StepInput, kv_cache: KVCache, rows: Tensor | None) -> Tensor:
        plan = self.kernels.prepare(self.plan(step, kv_cache), self.heads, self.rope)
        tokens = torch.from_numpy(step.token_ids).to(self.device, torch.int64)
        return self.run_layers(tokens, plan, kv_cache, rows)

    def plan(self, step: StepInput, kv_cache: KVCache) -> StepWork:
        """Check a step and plan its attention, on the host.

        Raises:
            ValueError: a field of `step` has a wrong shape or range.
        """
        check_step(step, kv_cache.block_size, kv_cache.num_blocks, self.config.vocab_size)
        if step.positions.size and int(step.positions.max()) >= self.max_model_len:
            raise ValueError(f"positions: must be below max_model_len {self.max_model_len}")
        run = self.kernels
        return plan_step(step, kv_cache.block_size, self.windows, run.run_rows, run.span)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [R, vocab_size] of hidden states [R, hidden_size]."""
        return self._lm_head(hidden).float()

    def run_layers(
        self, tokens: Tensor, plan: Any, kv_cache: KVCache, rows: Tensor | None
    ) -> Tensor:
        """Run all layers, waiting for nothing: what a graph is captured over.

        tokens: int64 [T]; plan: the kernels', loaded with the step. Returns hidden states of
        `rows`, int64 [R], or of all; the last layer leaves out the others.
        """
        return self._layers(self._embedding(tokens), plan, kv_cache.layers, rows)


class _Reader:
    """Reads tensors in the decoder's dtype and device, and linear layers for its kernels."""

    def __init__(
        self, weights: Weights, kernels: Kernels, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._weights = weights
        self._kernels = kernels
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str) -> Tensor:
        return self._weights.get(name).to(self._device, self._dtype).contiguous()

    def linear(self, names: list[str], bias: bool) -> Linear:
        """One layer out of the named ones, outputs side by side."""
        matrices = [self._weight(f"{name}.weight") for name in names]
        biases = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        return self._kernels.linear(matrices, biases)

    def embedding(self, name: str, tied: Linear | None) -> Callable[[Tensor], Tensor]:
        """The look-up of a token's row."""
        return self._kernels.embedding(self._weight(name), tied)

    def _weight(self, name: str) -> Weight:
        read: Callable[[], Tensor] = lambda: self.tensor(name)  # noqa: E731
        raw = self._weights.raw(name)
        if raw is None:
            return Weight(read, self._weights.storage_type(name), self._weights.shape(name))
        kind, data, shape = raw
        return Weight(read, kind, shape, data)


def _read_layer(reader: _Reader, config: ModelConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qk_norm = None
    if config.qk_norm:
        q_weight = reader.tensor(f"{attention}.q_norm.weight")
        k_weight = reader.tensor(f"{attention}.k_norm.weight")
        qk_norm = (q_weight, k_weight, config.rms_norm_eps)
    slides = config.sliding_layers[index] if config.sliding_layers else True
    return Layer(
        reader.tensor(f"{prefix}.input_layernorm.weight"),
        reader.linear([f"{attention}.{p}_proj" for p in "qkv"], config.attention_bias),
        qk_norm,
        reader.linear([f"{attention}.o_proj"], config.attention_output_bias),
        reader.tensor(f"{prefix}.post_attention_layernorm.weight"),
        reader.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias),
        reader.linear([f"{mlp}.down_proj"], config.mlp_bias),
        config.sliding_window if slides else None,
    )
