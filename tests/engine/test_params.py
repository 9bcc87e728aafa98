import math
from dataclasses import fields

import pytest

from prefixcache.errors import InvalidArgument
from prefixcache.limits import DEFAULTS
from prefixcache.params import BeamSearchParams, SamplingParams

V = 100
DENORMAL = 5e-324
NON_FINITE = [math.nan, math.inf, -math.inf]


def refused_field(**values):
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**values).validate(V, where="request.sampling")
    return caught.value.field


@pytest.mark.parametrize("value", [*NON_FINITE, -1.0, 1e308, 10**400, "1", None])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "repetition_penalty"],
)
def test_numbers_that_are_no_number_in_range_are_refused(name, value):
    """SE-07: NaN passes naive comparisons; 10**400 does not fit a float."""
    assert refused_field(**{name: value}) == f"request.sampling.{name}"


@pytest.mark.parametrize("value", [*NON_FINITE, -2.1, 2.1, 1e308])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_beyond_their_range_are_refused(name, value):
    """SE-07"""
    assert refused_field(**{name: value}) == f"request.sampling.{name}"


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
)
def test_denormal_numbers_are_in_range(name):
    """SE-07: they are finite and positive; test_sampler.py shows that they do no harm."""
    SamplingParams(**{name: DENORMAL}).validate(V)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),  # would keep no token
        ("top_p", 1.0000001),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.0),
        ("top_k", True),
        ("min_p", 1.0000001),
        ("n", 0),
        ("n", DEFAULTS.n + 1),
        ("repetition_penalty", 0.0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),  # above the default max_tokens
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stream_key", 2**64),
    ],
)
def test_values_out_of_range_name_their_field(name, value):
    """SM-03 (top_p = 0, top_k), GR-06"""
    assert refused_field(**{name: value}) == f"request.sampling.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 1e-9),
        ("top_p", 1),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 1),
        ("top_k", V),
        ("top_k", V + 1),
        ("temperature", 0),
        ("temperature", 1e-7),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("stream_key", 2**64 - 1),
        ("logit_bias", {0: 100, V - 1: -100}),
        ("max_tokens", None),
        ("max_tokens", 0),
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(name, value):
    """SM-03 (off values), PS-01 (largest seed)"""
    SamplingParams(**{name: value}).validate(V)


@pytest.mark.parametrize(
    "bias", [{-1: 1.0}, {V: 1.0}, {2**31: 1.0}, {True: 1.0}, {5: math.nan}, {5: 100.1}, {"5": 1.0}]
)
def test_logit_bias_beyond_the_vocabulary_or_range_is_refused(bias):
    """SM-12"""
    assert refused_field(logit_bias=bias) == "request.sampling.logit_bias"


@pytest.mark.parametrize(
    ("name", "one", "limit"),
    [
        ("logit_bias", None, DEFAULTS.logit_bias),
        ("stop", "x", DEFAULTS.stop),
        ("stop_token_ids", 5, DEFAULTS.stop_token_ids),
    ],
)
def test_each_list_may_have_as_many_entries_as_documented(name, one, limit):
    """SE-06, SE-10: the limit itself passes, one more is refused before any work."""

    def entries(count):
        return dict.fromkeys(range(count), 1.0) if name == "logit_bias" else (one,) * count

    SamplingParams(**{name: entries(limit)}).validate(10**6)
    with pytest.raises(InvalidArgument, match="at most"):
        SamplingParams(**{name: entries(limit + 1)}).validate(10**6)


def test_sizes_of_numbers_that_stand_for_work_are_limited():
    """SE-10: n and the logprobs."""
    most = DEFAULTS.logprobs
    SamplingParams(n=DEFAULTS.n, logprobs=most, prompt_logprobs=most).validate(V)
    assert refused_field(logprobs=most + 1) == "request.sampling.logprobs"
    assert refused_field(prompt_logprobs=most + 1) == "request.sampling.prompt_logprobs"


@pytest.mark.parametrize(
    "stop",
    [
        ("",),
        ("x" * (DEFAULTS.stop_chars + 1),),
        ("x" * 10**6,),
        ("\ud800",),
        ("x",) * 500_000,
        "ab",  # would be taken for the strings "a" and "b"
    ],
)
def test_stop_strings_that_cannot_be_served_are_refused(stop):
    """SE-06: empty, too long, too many, no Unicode text."""
    assert refused_field(stop=stop) == "request.sampling.stop"


def test_a_million_biases_are_counted_before_they_are_looked_at():
    """SE-06: the first of them would be refused too, for its value."""
    with pytest.raises(InvalidArgument, match="has 1000000 entries; at most 1024"):
        SamplingParams(logit_bias=dict.fromkeys(range(10**6), math.nan)).validate(10**6)


@pytest.mark.parametrize("value", [*NON_FINITE, -10.1, 10.1, 1e308, 10**400])
def test_a_length_penalty_that_is_no_number_in_range_is_refused(value):
    """SE-07: -1 and a denormal are numbers in its range."""
    with pytest.raises(InvalidArgument) as caught:
        BeamSearchParams(2, length_penalty=value).validate(V)
    assert caught.value.field == "beam_search.length_penalty"
    for good in (-1.0, DENORMAL, -10, 10):
        BeamSearchParams(2, length_penalty=good).validate(V)


@pytest.mark.parametrize("token", [-1, V, 2**31])
def test_stop_token_ids_beyond_the_vocabulary_are_refused(token):
    assert refused_field(stop_token_ids=(token,)) == "request.sampling.stop_token_ids"


def test_seed_and_stream_key_exclude_each_other():
    assert refused_field(seed=1, stream_key=1) == "request.sampling.stream_key"


def test_without_tokens_to_sample_there_is_one_sample():
    assert refused_field(max_tokens=0, n=2) == "request.sampling.n"


def test_greedy_is_a_temperature_below_the_documented_limit():
    """SM-01"""
    assert [SamplingParams(temperature=t).greedy for t in (0, 1e-7, 9.99e-4, 1e-3, 1.0)] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_every_parameter_is_documented():
    assert all(
        parameter.name in (SamplingParams.__doc__ or "") for parameter in fields(SamplingParams)
    )
