"""How fast a trace is replayed through the cache, and what it shows.

    PREFIXCACHE_DATA=data python -m benchmarks.simulate --json

On the Mooncake conversation trace where `make data` has fetched it; else on a synthetic one of
equal shape: conversations of several turns, 24 blocks of 512 tokens a request.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks._report import Report
from benchmarks.traces import MOONCAKE, find
from prefixcache.simulate.bounds import BlockNumbers, belady, plain_lru
from prefixcache.simulate.formats import MOONCAKE_BLOCK, read_trace
from prefixcache.simulate.replay import Replay
from prefixcache.simulate.trace import Request, SequenceRecord

POOL = 20_000
ROUNDS = 3


def main() -> None:
    report = Report("simulate", "Blocks a second of a replay, and hit rates.")
    options = report.parse()
    path = find(MOONCAKE)
    limit = 3_000 if options.quick else 12_031
    requests = synthetic(limit) if path is None else read_trace(path, limit=limit).requests
    report.add("trace", "synthetic" if path is None else path.name)
    report.add("blocks", sum(len(s.blocks) for r in requests for s in r.sequences))
    rates, on_cpu = [], []
    for _ in range(ROUNDS):
        began, used = time.perf_counter(), time.process_time()
        hits = Replay(POOL, MOONCAKE_BLOCK).run(requests)
        rates.append(hits.asked_blocks / (time.perf_counter() - began))
        on_cpu.append(hits.asked_blocks / (time.process_time() - used))
    report.add("blocks_per_s", max(rates), unit="best of 3", at_least=200_000)
    report.add("blocks_per_cpu_s", max(on_cpu), unit="by processor time, for a busy machine")
    numbers = BlockNumbers(requests, MOONCAKE_BLOCK)
    report.add("hit_rate", hits.block_rate, unit=f"{POOL:,} blocks")
    report.add("hit_rate_lru", plain_lru(numbers, POOL).block_rate)
    report.add("hit_rate_bound", belady(numbers, POOL).block_rate)
    report.add("hit_rate_unlimited", belady(numbers, numbers.num_blocks).block_rate)
    report.finish()


def synthetic(count: int) -> Sequence[Request]:
    """Requests that go on with an earlier one, or begin anew, in even odds."""
    random = np.random.default_rng(0)
    talks: list[np.ndarray] = []
    requests: list[Request] = []
    fresh = 1
    for at in range(count):
        old = talks[random.integers(len(talks))] if talks and random.random() < 0.5 else None
        front = np.zeros(1, np.uint64) if old is None else old
        more = int(random.integers(2, 30))
        names = np.concatenate([front, np.arange(fresh, fresh + more, dtype=np.uint64)])
        fresh += more
        talks = [*talks[-500:], names]
        tokens = len(names) * MOONCAKE_BLOCK
        record = SequenceRecord(tokens, 0, tokens, names, len(names))
        requests.append(Request(at, at, (record,)))
    return requests


if __name__ == "__main__":
    main()
