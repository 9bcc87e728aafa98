"""Rotary tables: the bits of Hugging Face's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from prefixcache.errors import ModelError
from prefixcache.model.config import RopeScaling
from prefixcache.model.rope import rope_table
from tests.model.test_kv_cache import CONFIG

THETA = 100000.0
KINDS: list[tuple[RopeScaling, dict[str, Any]]] = [
    (RopeScaling(), {"rope_type": "default"}),
    (RopeScaling("linear", 3.0), {"rope_type": "linear", "factor": 3.0}),
    (
        RopeScaling("llama3", 8.0, 256, 1.0, 4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    (
        RopeScaling("yarn", 4.0, 256),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ),
    (
        RopeScaling("yarn", 40.0, 256, mscale=1.0, mscale_all_dim=0.8, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 256,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "truncate": False,
        },
    ),
]


@pytest.mark.parametrize(("scaling", "fields"), KINDS)
def test_tables_equal_hugging_face(scaling: RopeScaling, fields: dict[str, Any]) -> None:
    config = replace(CONFIG, head_dim=64, rope_theta=THETA, rope_scaling=scaling, max_position=1024)
    reference = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=128,
            num_attention_heads=2,
            max_position_embeddings=1024,
            rope_parameters={"rope_theta": THETA, **fields},
        )
    )
    cos, sin = reference(torch.zeros(1), torch.arange(1000)[None])
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), -1)
    table = rope_table(config, 1000)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-7)


def test_an_odd_head_size_is_refused() -> None:
    with pytest.raises(ModelError, match="head_dim 7"):
        rope_table(replace(CONFIG, head_dim=7), 16)
