"""The live size curve (`cache/reuse.py`) against replay at each size, on the Mooncake trace."""

import pytest
import xxhash

from benchmarks.traces import MOONCAKE
from prefixcache.cache.reuse import ReuseCurve
from prefixcache.simulate.formats import MOONCAKE_BLOCK, read_trace
from prefixcache.simulate.replay import Replay
from tests.simulate.test_public_traces import path_of

SCALES = (0.25, 0.5, 1, 2, 4, 8)
POINTS = 0.02


@pytest.mark.slow
@pytest.mark.parametrize("size", [1_000, 6_000, 12_000])
@pytest.mark.parametrize("max_samples", [2_048, 16_384])
def test_the_curve_is_within_two_points_of_replay(size, max_samples):
    requests = read_trace(path_of(MOONCAKE)).requests
    curve = ReuseCurve(size, 8 * size, max_samples=max_samples)
    pool = Replay(size, MOONCAKE_BLOCK)
    for request in requests:
        before = pool.hits.hit_blocks
        pool.run([request])
        names = request.sequences[0].blocks
        digests = b"".join(xxhash.xxh3_128_digest(name.tobytes(), 7) for name in names)
        curve.access(digests, len(names), pool.hits.hit_blocks - before)
        curve.touch(digests)
    sizes = [int(size * scale) for scale in SCALES]
    replayed = [Replay(blocks, MOONCAKE_BLOCK).run(requests).block_rate for blocks in sizes]
    assert curve.hit_rates(sizes) == pytest.approx(replayed, abs=POINTS)
