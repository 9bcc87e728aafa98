import random

import numpy as np
import pytest
import torch

from prefixcache.engine.philox import derive_key, philox4x32, root_key, uniform

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values):
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert tuple(int(word[0]) for word in philox4x32(words(counter), words(key))) == expected


def test_uniform_is_made_of_the_first_two_words():
    low, high = 0x243F6A88_85A308D3, 0x12345678_9ABCDEF0
    key, position = np.array([low], np.uint64), np.array([2**40 + 5])
    counter = words((5, 2**8, 0, 0))
    first, second, _, _ = philox4x32(counter, words((low & 0xFFFFFFFF, low >> 32)))
    expected = ((int(first[0]) << 32 | int(second[0])) >> 11) / 2**53
    assert uniform(key, position)[0] == expected
    assert uniform(np.array([high], np.uint64), position)[0] != expected


def test_uniform_of_a_row_does_not_depend_on_the_batch():
    keys = np.array([root_key(seed) for seed in range(100)], np.uint64)
    positions = np.arange(100) * 977
    together = uniform(keys, positions)
    alone = [uniform(keys[i : i + 1], positions[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == alone


def test_uniform_fills_the_unit_interval_evenly():
    """Chi-square over 64 bins; 63 degrees of freedom, 99.9 % lie below 103.4."""
    samples = uniform(np.full(64_000, root_key(1), np.uint64), np.arange(64_000))
    counts = np.bincount((samples * 64).astype(int), minlength=64)
    assert samples.min() >= 0
    assert samples.max() < 1
    assert ((counts - 1000) ** 2 / 1000).sum() < 103.4


def test_streams_of_branches_and_neighbouring_seeds_are_unrelated():
    positions = np.arange(10_000)
    keys = [root_key(7), root_key(8), derive_key(root_key(7), 0), derive_key(root_key(7), 1)]
    streams = np.stack([uniform(np.full(10_000, key, np.uint64), positions) for key in keys])
    correlation = np.corrcoef(streams) - np.eye(4)
    assert np.abs(correlation).max() < 0.04


def test_keys_of_one_request_differ_for_any_seed():
    """PS-01: n samples of one seed, 2**64 - 1 included, have keys of their own, the same again."""
    for seed in (0, 7, 2**63, 2**64 - 1):
        keys = [derive_key(root_key(seed), branch) for branch in range(256)]
        assert len({root_key(seed), *keys}) == 257
        assert all(0 <= key < 2**64 for key in keys)
        assert keys == [derive_key(root_key(seed), branch) for branch in range(256)]


def test_keys_are_the_same_in_every_process_and_version():
    assert root_key(7) == 0x8B2697067ADCF4DA
    assert derive_key(7, 3) == 0xB96D5E7B29BBDE49


def test_no_global_generator_is_touched():
    """SM-08: nothing is drawn from, or put into, a global generator."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    uniform(np.array([root_key(11)], np.uint64), np.array([3]))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after
