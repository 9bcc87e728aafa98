"""How long a step takes: a roofline, and the figures of a model that it needs.

Owns the arithmetic and its assumptions, all of which are printed. A step takes the longer of

    operations = 2 · parameters · tokens  +  4 · layers · heads · head_dim · (query, key) pairs
    bytes      = weights  +  KV that is read

over peak rate times the share of the peak that kernels reach (S. Williams et al., Roofline, CACM
2009). Left out: communication, sampling, host time, a shared prefix being read once for several.
"""

from dataclasses import dataclass

from prefixcache.model.config import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model as the roofline sees it.

    parameters: 0 where they are not known; then no time can be told.
    pair_operations: operations for each pair of a query and a key, all layers.
    """

    name: str
    bytes_per_token: int
    parameters: int
    weight_bytes: int
    pair_operations: int

    @property
    def known(self) -> bool:
        """True where a step's time can be estimated."""
        return self.parameters > 0


def cost_of(config: ModelConfig, name: str, dtype: str) -> ModelCost:
    """From a model's configuration; weights and cache are both of `dtype`."""
    width = BYTES[dtype]
    kv_row = config.num_kv_heads * config.head_dim
    parameters = count_parameters(config)
    return ModelCost(
        name,
        bytes_per_token=2 * config.num_layers * kv_row * width,
        parameters=parameters,
        weight_bytes=parameters * width,
        pair_operations=4 * config.num_layers * config.num_heads * config.head_dim,
    )


def count_parameters(config: ModelConfig) -> int:
    """Weights of a decoder of the Llama shape; norms and biases are too few to count."""
    hidden, rows = config.hidden_size, config.num_heads * config.head_dim
    attention = 2 * hidden * rows + 2 * hidden * config.num_kv_heads * config.head_dim
    layer = attention + 3 * hidden * config.intermediate_size
    embeddings = 1 if config.tie_embeddings else 2
    return config.num_layers * layer + embeddings * config.vocab_size * hidden


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator.

    memory: bytes. utilization: share of it for weights and cache. tflops, bandwidth (GB/s): peaks.
    efficiency: share of both peaks that kernels reach.
    """

    memory: int
    utilization: float = 0.9
    tflops: float = 989.0
    bandwidth: float = 3350.0
    efficiency: float = 0.6


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step on given hardware; one step each where the model's size is not known."""

    model: ModelCost
    hardware: Hardware

    def seconds(self, tokens: float, pairs: float, kv_tokens: float) -> float:
        """tokens: that run. pairs: of queries and keys. kv_tokens: whose KV is read."""
        if not self.model.known:
            return 1.0
        reach = self.hardware.efficiency
        operations = 2 * self.model.parameters * tokens + self.model.pair_operations * pairs
        moved = self.model.weight_bytes + self.model.bytes_per_token * kv_tokens
        return max(
            operations / (self.hardware.tflops * 1e12 * reach),
            moved / (self.hardware.bandwidth * 1e9 * reach),
        )
