"""`activation_quantization="int8"` on the default model: same bits, its own namespace, refusals."""

import pytest

from prefixcache import Engine, EngineConfig, SamplingParams
from prefixcache.engine.build import Arithmetic
from prefixcache.errors import ConfigurationError
from tests.model.checkpoints import default_model_path

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
PROMPT = list(range(300, 450))


def _engine(**fields: object) -> Engine:
    config = EngineConfig(  # type: ignore[arg-type]
        model=str(default_model_path()), num_gpu_blocks_override=64, max_model_len=512, **fields
    )
    return Engine(config)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return _engine(activation_quantization="int8")


def test_the_self_test_holds_and_answers_are_the_same_bits_cached_and_batched(
    engine: Engine,
) -> None:
    assert engine.same_bits
    assert engine.arithmetic == Arithmetic("float32", "float32", "cpu", "int8")
    (cold,) = engine.generate([PROMPT], GREEDY)
    warm, beside = engine.generate([PROMPT, PROMPT[40:]], GREEDY)
    assert warm.num_cached_tokens > 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert warm.outputs[0].logprobs == cold.outputs[0].logprobs
    (alone,) = engine.generate([PROMPT[40:]], GREEDY)
    assert beside.outputs[0].logprobs == alone.outputs[0].logprobs


def test_other_arithmetic_has_other_logprobs_and_a_namespace_of_its_own(engine: Engine) -> None:
    plain = _engine()
    (exact,) = plain.generate([PROMPT], GREEDY)
    (quantised,) = engine.generate([PROMPT], GREEDY)
    assert exact.outputs[0].logprobs != quantised.outputs[0].logprobs
    assert plain.requests.namespaces("") != engine.requests.namespaces("")


def test_where_it_is_not_served_the_engine_says_so() -> None:
    with pytest.raises(ConfigurationError, match="activation_quantization 'int4': None or 'int8'"):
        EngineConfig(activation_quantization="int4")
    with pytest.raises(
        ConfigurationError, match="served by attention_backend 'cpu' in float32, not by 'torch'"
    ):
        _engine(activation_quantization="int8", attention_backend="torch")
