"""Requests served with time: the roofline by hand, preemption, samples; that nothing is lost."""

from dataclasses import replace

import numpy as np
import pytest

from prefixcache.cache import check_integrity
from prefixcache.model.config import ModelConfig
from prefixcache.simulate.cost import Hardware, ModelCost, StepCost, cost_of
from prefixcache.simulate.serving import Limits, Served, Serving
from prefixcache.simulate.trace import Request, SequenceRecord
from tests.simulate.traces import BLOCK, group, sequence, shared_prompt

HARDWARE = Hardware(memory=10**9, tflops=1.0, bandwidth=1.0, efficiency=0.5)
MODEL = ModelCost("m", bytes_per_token=100, parameters=1000, weight_bytes=2000, pair_operations=40)
STEPS = ModelCost("unknown", 100, 0, 0, 0)


def serve(
    trace: list[Request], num_blocks: int, model: ModelCost = STEPS, **limits: int
) -> tuple[Served, Serving]:
    server = Serving(Limits(num_blocks, BLOCK, **limits), StepCost(model, HARDWARE))
    served = server.run(trace)
    check_integrity(server.manager)
    assert server.manager.num_in_use == 0
    return served, server


def lengths(at: float, prompt: int, output: int, priority: int = 0) -> Request:
    none = np.empty(0, np.uint64)
    return group(at, SequenceRecord(prompt, output, prompt + output, none, 0), priority=priority)


def test_a_step_takes_the_longer_of_arithmetic_and_memory():
    cost = StepCost(MODEL, HARDWARE)
    assert cost.seconds(1, 10, 10) == pytest.approx((2000 + 100 * 10) / 0.5e9)
    assert cost.seconds(1e6, 0, 0) == pytest.approx(2 * 1000 * 1e6 / 0.5e12)
    assert cost.seconds(1e6, 1e9, 0) == pytest.approx((2e9 + 40e9) / 0.5e12)
    assert StepCost(STEPS, HARDWARE).seconds(7, 7, 7) == 1.0


def test_a_models_figures_follow_from_its_configuration():
    llama = ModelConfig("llama", 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, 1e-5, 5e5)
    cost = cost_of(llama, "llama-3-8b", "bfloat16")
    assert cost.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert cost.bytes_per_token == 2 * 32 * 8 * 128 * 2
    tied = replace(llama, tie_embeddings=True)
    assert cost.parameters - cost_of(tied, "", "float32").parameters == 128_256 * 4096


def test_one_request_takes_its_prefill_and_one_step_a_token_behind_the_first():
    served, _ = serve([lengths(0, 40, 10)], 16)
    assert (served.seconds, served.output_tokens) == (1 + 9, 10)
    assert served.first_token == [1.0]
    chunked, _ = serve([lengths(0, 40, 10)], 16, token_budget=16)
    assert chunked.first_token == [3.0]


def test_between_two_requests_far_apart_nothing_runs():
    served, _ = serve([lengths(0, 40, 10), lengths(1000, 40, 10)], 16, MODEL)
    idle = [point for point in served.course if point[1] == 0]
    assert [point[0] for point in idle] == [pytest.approx(served.course[0][0], abs=1), 1000]


def test_seconds_of_one_request_are_the_sum_of_its_steps():
    served, _ = serve([lengths(3.0, 40, 30)], 16, MODEL)
    cost = StepCost(MODEL, HARDWARE)
    expected = cost.seconds(40, 40 * 20, 40)
    expected += sum(cost.seconds(1, n, n) for n in range(41, 70))
    assert served.busy == pytest.approx(expected)
    assert served.seconds == pytest.approx(3.0 + expected)


def test_requests_wait_until_they_have_arrived():
    trace = [replace(lengths(0.0, 40, 30)), lengths(5.0, 40, 30)]
    served, _ = serve(trace, 16, MODEL)
    assert served.most_running == 1
    assert served.seconds == pytest.approx(5.0 + served.busy / 2)


def test_lack_of_blocks_preempts_the_youngest_which_still_ends():
    trace = [lengths(0, 16, 64), lengths(1, 16, 64), lengths(2, 16, 64)]
    served, _ = serve(trace, 8)
    assert served.preemptions > 0
    assert served.output_tokens == 3 * 64
    assert served.most_blocks <= 8
    roomy, _ = serve(trace, 15)
    assert (roomy.preemptions, roomy.recomputed_tokens, roomy.most_running) == (0, 0, 3)


def test_the_most_urgent_goes_first_and_is_not_preempted():
    trace = [lengths(0, 16, 64), lengths(1, 16, 64, priority=-1)]
    served, server = serve(trace, 8, max_num_seqs=1)
    assert served.preemptions == 0
    assert served.first_token == [1.0, 1.0 + 64]
    assert server.manager.num_evictable == 4 + 3  # of the one that ended first, a block has gone


def test_what_can_never_fit_is_refused():
    served, _ = serve([lengths(0, 16, 200), lengths(0, 16, 16)], 8)
    assert (served.hits.refused, served.output_tokens) == (1, 16)


def test_sequences_at_once_are_limited():
    served, _ = serve([lengths(0, 16, 16)] * 10, 100, max_num_seqs=3)
    assert served.most_running == 3
    assert served.output_tokens == 160


def test_a_shared_prompt_is_computed_once_although_all_come_together():
    served, _ = serve(shared_prompt(20, shared=8, own=4), 500)
    assert served.hits.hit_blocks == 19 * 8


def test_samples_begin_when_their_prompt_is_done_and_share_it():
    first = sequence([1, 2, 3], output=20)
    sample = replace(first, sample=True)
    served, server = serve([group(0, first, sample, sample)], 3 + 3 * 2)
    assert served.hits.asked_blocks == 3
    assert served.output_tokens == 60
    assert (served.most_running, served.most_blocks) == (3, 9)
    assert server.manager.num_evictable == 3 + 3


def test_a_thousand_requests_in_a_narrow_pool_all_end():
    random = np.random.default_rng(5)
    trace = [
        lengths(at / 1e5, int(random.integers(1, 90)), int(random.integers(0, 90)))
        for at in range(1000)
    ]
    served, _ = serve(trace, 24, MODEL)
    assert served.hits.refused == 0
    assert served.output_tokens == sum(r.sequences[0].output_tokens for r in trace)
    assert served.preemptions > 0
