"""Whole steps of a model of Llama-3.1-8B's shape, and what batch-invariant linear layers cost."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from benchmarks._report import Report
from benchmarks.gpu_check.device import BLOCK, LLAMA_8B, TOY, Row, Target, make_step, random_decoder
from prefixcache.model.config import ModelConfig
from prefixcache.model.decode_graph import DecodeGraph
from prefixcache.model.kv_cache import KVCache
from prefixcache_kernels.reference import PlainLinear
from prefixcache_kernels.triton_backend.backend import shared_kib
from prefixcache_kernels.triton_backend.linear import InvariantLinear

_LAYER_BYTES = 450 << 20
"""Weights of one layer of the 8B shape in bfloat16, rounded up."""


def linears(report: Report, target: Target) -> None:
    """Our batch-invariant layers against the device library's, on each shape of the model."""
    config = TOY if target.toy else LLAMA_8B
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {
        "qkv": (heads, config.hidden_size),
        "output": (config.hidden_size, config.num_heads * config.head_dim),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }
    where = {"device": target.device, "dtype": target.dtype}
    layers = {}
    for name, (outputs, inputs) in shapes.items():
        weight = torch.randn(outputs, inputs, **where) * inputs**-0.5
        layers[name] = (
            InvariantLinear(weight, None, shared_kib(target.device)),
            PlainLinear(weight, None),
        )
    for rows in (1, 5) if target.toy else (1, 16, 64, 256, 2_048):
        for name, pair in layers.items():
            x = torch.randn(rows, pair[0].in_features, **where)
            torch.testing.assert_close(pair[0](x), pair[1](x), rtol=2e-2, atol=2e-2)
            times = [target.seconds(lambda layer=layer, x=x: layer(x)) for layer in pair]  # type: ignore[misc]
            report.add(f"linear_{name}_m{rows}_vs_library", times[1] / times[0], unit="as fast")
        ours, theirs = (_all_layers(target, layers.values(), rows, which) for which in (0, 1))
        report.add(f"linear_layer_m{rows}_cost", ours / theirs, unit="times the library's time")


def _all_layers(
    target: Target, layers: Iterable[tuple[InvariantLinear, PlainLinear]], rows: int, which: int
) -> float:
    """Time of one layer's products one after another: no weights are still in the cache."""
    work = []
    for pair in layers:
        weight = pair[0].weight
        x = torch.randn(rows, pair[0].in_features, device=weight.device, dtype=weight.dtype)
        work.append((pair[which], x))
    return target.seconds(lambda: [layer(x) for layer, x in work])


def steps(report: Report, target: Target) -> None:
    """A decode step of 64 sequences: device and host time, with and without batch invariance."""
    config = _that_fits(target)
    report.add("step_layers", config.num_layers, unit="layers of the model")
    seconds = {}
    for invariant in (False, True):
        name = "invariant" if invariant else "plain"
        times = _step_seconds(config, target, invariant)
        for how, (host, whole) in times.items():
            report.add(f"step_{name}_{how}_host_ms", host * 1e3, unit="ms, the host is free again")
            report.add(f"step_{name}_{how}_ms", whole * 1e3, unit="ms, the logits are there")
        seconds[invariant] = times["captured"][1]
        if not target.toy:
            torch.cuda.empty_cache()
    cost = seconds[True] / seconds[False] - 1
    report.add("batch_invariant_step_cost", cost, unit="of a step's time more")


def _that_fits(target: Target) -> ModelConfig:
    if target.toy:
        return TOY
    layers = min(LLAMA_8B.num_layers, int(target.free_bytes() * 0.6) // _LAYER_BYTES)
    return replace(LLAMA_8B, num_layers=max(1, layers))


@torch.inference_mode()
def _step_seconds(
    config: ModelConfig, target: Target, invariant: bool
) -> dict[str, tuple[float, float]]:
    """Median host and whole time of a step, launched and captured.

    64 sequences of 1,024 tokens, half of them shared.
    """
    batch, context = (2, 48) if target.toy else (64, 1_024)
    own = context // 2 // BLOCK
    decoder = random_decoder(
        config, target, batch_invariant=invariant, max_model_len=context + BLOCK
    )
    cache = KVCache(
        config,
        own + batch * (own + 1),
        BLOCK,
        target.dtype,
        target.device,
        kernels=decoder.kernels,
    )
    cache.keys.normal_()
    cache.values.normal_()
    width = context // BLOCK - own
    rows = [
        Row([i], context - 1, [*range(own), *range(own + i * width, own + (i + 1) * width)])
        for i in range(batch)
    ]
    step = make_step(rows)
    graph = DecodeGraph(decoder, cache, rows=batch, blocks=context // BLOCK)
    launched, captured = decoder.forward(step, cache), graph.run(step)
    torch.testing.assert_close(captured, launched, rtol=1e-2, atol=1e-2)
    rounds = 1 if target.toy else 15
    return {
        "launched": _host_and_whole(target, lambda: decoder.forward(step, cache), rounds),
        "captured": _host_and_whole(target, lambda: graph.run(step), rounds),
    }


def _host_and_whole(target: Target, run: Callable[[], object], rounds: int) -> tuple[float, float]:
    target.synchronize()
    hosts, wholes = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        hosts.append(time.perf_counter() - begin)
        target.synchronize()
        wholes.append(time.perf_counter() - begin)
    return sorted(hosts)[len(hosts) // 2], sorted(wholes)[len(wholes) // 2]
