"""The two public traces, where `make data` or PREFIXCACHE_DATA has them; skipped elsewhere."""

import json
from pathlib import Path

import pytest

from benchmarks import traces
from benchmarks.traces import AZURE, MOONCAKE, PublicTrace
from prefixcache.simulate.bounds import BlockNumbers, belady
from prefixcache.simulate.formats import read_trace
from prefixcache.simulate.memory import compare_schemes
from prefixcache.simulate.replay import Replay
from prefixcache.simulate.trace import distinct_blocks


def path_of(trace: PublicTrace) -> Path:
    path = traces.find(trace)
    if path is None:
        pytest.skip(f"{trace.name} is not here: make data")
    return path


@pytest.mark.slow
def test_with_unlimited_room_the_mooncake_trace_hits_what_a_set_of_ids_says():
    path = path_of(MOONCAKE)
    seen, hits, asked = set(), 0, 0
    for line in path.read_text().splitlines():
        for name in json.loads(line)["hash_ids"]:
            asked, hits = asked + 1, hits + (name in seen)
            seen.add(name)
    trace = read_trace(path)
    found = Replay(distinct_blocks(trace.requests), 512).run(trace.requests)
    assert (found.asked_blocks, found.hit_blocks) == (asked, hits)
    assert round(100 * found.block_rate, 1) == 36.6
    bound = belady(BlockNumbers(trace.requests, 512), distinct_blocks(trace.requests))
    assert bound.hit_blocks == hits


def test_reserving_the_longest_leaves_nine_tenths_of_the_azure_trace_unused():
    longest = compare_schemes(read_trace(path_of(AZURE)).sequences)[0]
    assert round(100 * longest.unused_at_end) == 90


def test_a_trace_that_cannot_be_fetched_is_said_with_what_to_do(tmp_path, monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setenv("PREFIXCACHE_DATA", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    assert traces.main() == 1
    assert "Network is unreachable" in (said := capsys.readouterr().err)
    assert "PREFIXCACHE_DATA" in said


def test_another_file_of_that_name_is_not_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREFIXCACHE_DATA", str(tmp_path))
    for trace in (MOONCAKE, AZURE):
        (tmp_path / trace.name).write_text("something else")
    assert traces.main() == 1
    assert "it is another file" in capsys.readouterr().err
