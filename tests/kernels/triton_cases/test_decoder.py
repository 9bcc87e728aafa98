"""A whole decoder on the Triton kernels against the same one on torch's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixcache.model.decode_graph import DecodeGraph, DecodeGraphs, batch_sizes
from prefixcache.model.kv_cache import FP8
from prefixcache_kernels import QuantizedCache
from tests.model.checkpoints import write_checkpoint
from tests.model.served import Served

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-odd-head-size": ("llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "qwen3-window-in-one-layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_prefill_decode_and_forks_equal_the_torch_backend(name: str, tmp_path: Path) -> None:
    family, fields = MODELS[name]
    directory = write_checkpoint(tmp_path, family, **fields)
    ours, theirs = (Served(directory, backend, blocks=32) for backend in ("triton", "torch"))
    assert ours.decoder.kernels.name == "triton"
    ours.decoder.kernels.span = 32
    tokens, other = ours.tokens(40), ours.tokens(4, seed=1)
    prompt, forks = [3, 1, 0], [[3, 1, 20], [3, 1, 21]]
    steps = [
        [(tokens[:34], 0, prompt)],
        [(tokens[34:38], 34, prompt), (other, 0, [11])],
        # Two forks of the prompt, each with its own copy of the last block, beside a decode row.
        [*[([7 + i], 38, ids) for i, ids in enumerate(forks)], (other[:1], 4, [11])],
    ]
    for number, rows in enumerate(steps):
        if number == 2:
            for served in (ours, theirs):
                served.cache.copy_blocks([(0, ids[-1]) for ids in forks])
        logits = ours.run(*rows)
        expected = theirs.run(*rows)
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    for part in ("keys", "values"):
        pools = getattr(ours.cache, part), getattr(theirs.cache, part)
        torch.testing.assert_close(*pools, rtol=0, atol=1e-4, equal_nan=True)


def test_quantised_keys_and_values_equal_the_torch_backend(tmp_path: Path) -> None:
    """Prefill, a copied block, and decoding; one step of e4m3 is up to a sixteenth of a value."""
    directory = write_checkpoint(tmp_path)
    ours, theirs = (
        Served(directory, backend, blocks=8, kv_dtype=FP8) for backend in ("triton", "torch")
    )
    tokens = ours.tokens(25)
    for served in (ours, theirs):
        served.run((tokens[:20], 0, [3, 1]))
        served.cache.copy_blocks([(1, 5)])
    step = [(tokens[20:], 20, [3, 5])]
    torch.testing.assert_close(ours.run(*step), theirs.run(*step), rtol=0, atol=0.05)
    for mine, other in zip(ours.cache.layers, theirs.cache.layers, strict=True):
        for x, y in zip(mine, other, strict=True):
            assert isinstance(x, QuantizedCache)
            torch.testing.assert_close(x.scales, y.scales, rtol=0.1, atol=0, equal_nan=True)


def test_a_decode_graph_serves_steps_of_any_size_up_to_its_own(tmp_path: Path) -> None:
    """Its launches, one by one: capturing them needs a GPU (`benchmarks.gpu_check`)."""
    served = Served(write_checkpoint(tmp_path), "triton", blocks=8)
    served.run((served.tokens(20), 0, [3, 1]), (served.tokens(5, seed=1), 0, [5]))
    graph = DecodeGraph(served.decoder, served.cache, rows=3, blocks=4)
    before = served.cache.keys.clone()
    for rows in ([([7], 20, [3, 1]), ([8], 5, [5])], [([9], 6, [5])]):
        step = served.step(*rows)
        torch.testing.assert_close(graph.run(step), served.run(*rows), rtol=0, atol=1e-5)
    changed = (served.cache.keys != before) & ~served.cache.keys.isnan()
    assert changed.flatten(2).any(2)[0].nonzero().flatten().tolist() == [1, 5]
    assert served.cache.keys[:, 0].isnan().all()  # nor has padding written anywhere before
    with pytest.raises(ValueError, match="token_ids: one for each of at most 3"):
        graph.run(served.step(*[([1], 6, [5])] * 4))
    with pytest.raises(ValueError, match="kernels 'torch' run from no graph"):
        DecodeGraph(Served(tmp_path, "torch").decoder, served.cache, rows=3, blocks=4)


def test_graphs_that_take_turns_over_one_memory_equal_launched_steps(tmp_path: Path) -> None:
    """Batches grow and shrink, so each step runs in another graph than the one before."""
    served = Served(write_checkpoint(tmp_path), "triton", blocks=16, max_model_len=64)
    prompts = {0: [3, 1], 1: [5, 6], 2: [7, 2], 3: [9, 8], 4: [11, 10]}
    served.run(*((served.tokens(18, seed=n), 0, ids) for n, ids in prompts.items()))
    captured: list[tuple[int, int]] = []
    graphs = DecodeGraphs(
        served.decoder,
        served.cache,
        max_rows=5,
        max_tokens=64,
        progress=lambda done, total: captured.append((done, total)),
    )
    assert captured == [(done, 4) for done in range(4)]
    for number, batch in enumerate(([0], [0, 1, 2, 3, 4], [4, 2], [1, 0, 3], [2])):
        step = served.step(*(([20 + number], 18, prompts[n]) for n in batch))
        logits = graphs.run(step)
        assert logits is not None
        torch.testing.assert_close(logits, served.decoder.forward(step, served.cache))


def test_steps_that_are_no_decode_steps_are_left_to_launches(tmp_path: Path) -> None:
    served = Served(write_checkpoint(tmp_path), "triton", blocks=4, max_model_len=64)
    graphs = DecodeGraphs(served.decoder, served.cache, max_rows=2, max_tokens=64)
    assert graphs.run(served.step(([1, 2], 0, [0]))) is None
    assert graphs.run(served.step(*[([1], 0, [0])] * 3)) is None
    silent = replace(served.step(([1], 0, [0])), logits_rows=np.zeros(0, np.int32))
    assert graphs.run(silent) is None
    needed = DecodeGraphs.bytes_needed(served.decoder, max_rows=2, max_tokens=64, block_size=16)
    assert needed > 2 * served.config.vocab_size * 4


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_batch_sizes_are_powers_of_two_and_the_largest(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes
