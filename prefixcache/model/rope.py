"""Rotary position embeddings: the frequencies of every scaling kind, and the table of angles.

Owns the formulas, in float32 and in the order of operations that Hugging Face uses, so that the
same bits come out. Never touches queries or keys: the kernels rotate.
"""

import math

import torch
from torch import Tensor

from prefixcache.errors import ModelError
from prefixcache.model.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, length: int) -> Tensor:
    """Return float32 [length, head_dim]: for each position, head_dim/2 cosines, then the sines.

    RoFormer (arXiv 2104.09864), with the pairs (i, i + head_dim/2).

    Raises:
        ModelError: dynamic scaling beyond its original length, or an odd head size.
    """
    scaling = config.rope_scaling
    if config.head_dim % 2:
        raise ModelError(f"head_dim {config.head_dim}: rotary embeddings need an even size")
    if scaling.kind == "dynamic":
        original = scaling.original_max_position or config.max_position
        if length > original:
            raise ModelError(
                f"dynamic rope scaling is served up to its original length of {original} tokens, "
                f"not {length}: beyond it, it changes keys that are cached already. "
                f"Set max_model_len to {original} or less"
            )
    frequencies, factor = inverse_frequencies(config)
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * frequencies  # [length, D/2]
    return torch.cat((angles.cos() * factor, angles.sin() * factor), -1)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return (float32 [head_dim/2] radians a token, factor on cosines and sines)."""
    dim, base, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    powers = base**exponents
    plain = 1.0 / powers
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(powers, base, dim, scaling), _yarn_attention_factor(scaling)
    return plain, 1.0


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a ramp between (Llama 3.1)."""
    low, high, length = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position,
    )
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > length / low, plain / scaling.factor, plain)
    smooth = (length / wavelength - low) / (high - low)
    ramp = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = ~(wavelength < length / high) * ~(wavelength > length / low)
    return torch.where(between, ramp, stretched)


def _yarn(powers: Tensor, base: float, dim: int, scaling: RopeScaling) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, a ramp between (YaRN, arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return (dim * math.log(turns)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
