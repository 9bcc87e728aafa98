"""A whole decoder on the Triton kernels against the same one on torch's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from prefixcache.model.decode_graph import DecodeGraph
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
    with pytest.raises(ValueError, match="token_ids: one for each of at most 3"):
        graph.run(served.step(*[([1], 6, [5])] * 4))
    with pytest.raises(ValueError, match="kernels 'torch' run from no graph"):
        DecodeGraph(Served(tmp_path, "torch").decoder, served.cache, rows=3, blocks=4)
