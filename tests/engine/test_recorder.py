"""What `serve --record` writes, and that its replay hits what the engine itself has hit."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from prefixcache import BeamSearchParams, Engine, SamplingParams
from prefixcache.engine.messages import Fork, ForkBranch, Generate
from prefixcache.engine.recorder import Recorder, open_record
from prefixcache.errors import ConfigurationError
from prefixcache.simulate.formats import read_trace
from prefixcache.simulate.replay import Replay

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BLOCK = 4


@pytest.fixture
def record() -> Iterator[Callable[[Engine, Path], None]]:
    """Starts recordings; their files are closed behind the test."""
    with ExitStack() as files:

        def start(engine: Engine, path: Path) -> None:
            recorder = Recorder(files.enter_context(open_record(path)))
            recorder.begin(BLOCK, engine.num_blocks)
            engine.observers.add(recorder)

        yield start


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("num_blocks", [24, 40, 400])
def test_replay_at_the_same_size_hits_the_same_whole_blocks(
    make_engine, record, tmp_path, num_blocks
):
    engine = make_engine(num_gpu_blocks_override=num_blocks, max_model_len=64)
    path = tmp_path / "trace"
    record(engine, path)
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 90, 25).tolist() for _ in range(6)]
    hits = 0
    for turn in range(40):
        prompt = list(prompts[turn % 6 if turn % 2 else 0])
        out = engine.generate([prompt[: 9 + turn % 13] + [3 + turn % 5] * (turn % 7)], GREEDY)[0]
        hits += out.num_cached_tokens // BLOCK
    assert hits > 30
    trace = read_trace(path)
    assert (trace.block_size, trace.pool_blocks, len(trace.requests)) == (BLOCK, num_blocks, 40)
    assert Replay(num_blocks, BLOCK).run(trace.requests).hit_blocks == hits


def test_samples_forks_and_beams_are_recorded_and_replayed(make_engine, record, tmp_path):
    engine = make_engine()
    path = tmp_path / "trace"
    record(engine, path)
    prompt = list(range(5, 18))
    three = SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True)
    engine.run([Generate("samples", tuple(prompt), three, cache_salt="tenant")])
    parent = Generate("parent", tuple(prompt), GREEDY, keep_seconds=60)
    engine.execute(parent)
    events = []
    while engine.has_work:
        events += engine.step()
    handle = next(e.sequence_id for e in events if hasattr(e, "sequence_id"))
    engine.run([Fork("fork", (ForkBranch(handle, GREEDY, position=14),))])
    engine.generate([prompt], BeamSearchParams(num_beams=3, max_tokens=5, num_return_sequences=2))
    written = lines(path)
    assert [line.get("kind") for line in written[1:]] == ["generate", "generate", "fork", "beam"]
    samples, parent_line, fork, beam = written[1:]
    assert [s.get("sample", False) for s in samples["sequences"]] == [False, True, True]
    assert fork["sequences"][0]["parent"] == parent_line["sequences"][0]["id"]
    assert (fork["sequences"][0]["position"], fork["sequences"][0]["forked"]) == (14, 13)
    assert (beam["beams"], len(beam["sequences"])) == (3, 2)
    text = path.read_text()
    assert handle not in text
    assert "tenant" not in text
    trace = read_trace(path)
    found = Replay(512, BLOCK).run(trace.requests)
    # 13 tokens are 3 whole blocks: other salt, first of its salt, inherited, and hit by the search.
    assert (found.asked_blocks, found.hit_blocks, found.inherited_tokens) == (9, 3, 12)


def test_each_run_has_its_own_key_and_the_file_is_the_owners(make_engine, record, tmp_path):
    path = tmp_path / "trace"
    for _ in range(2):
        engine = make_engine()
        record(engine, path)
        engine.generate([list(range(5, 18))], GREEDY)
    first, second = (line["sequences"][0]["blocks"] for line in lines(path) if "end" in line)
    assert len(first) == len(second) == 16 * (18 // BLOCK)
    assert first != second
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_trace(path).requests) == 2


def test_a_full_disk_ends_the_recording_once_and_no_request(make_engine, caplog):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    engine = make_engine()
    recorder = Recorder(Full())
    engine.observers.add(recorder)
    with caplog.at_level(logging.ERROR):
        recorder.begin(BLOCK, engine.num_blocks)
        for _ in range(3):
            assert len(engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids) == 6
    assert [r.getMessage() for r in caplog.records] == [
        "recording has stopped: [Errno 28] No space left on device"
    ]


def test_a_line_that_only_half_fits_is_taken_back(make_engine, tmp_path):
    """The file stays a trace that can be read, and the next server can go on with it."""

    class Narrow(io.TextIOWrapper):
        room = 10**6

        def write(self, text: str) -> int:
            super().write(text[: self.room])
            super().flush()
            if len(text) > self.room:
                raise OSError(28, "No space left on device")
            return len(text)

    engine = make_engine()
    path = tmp_path / "trace"
    narrow = Narrow(path.open("wb"))
    recorder = Recorder(narrow)
    recorder.begin(BLOCK, engine.num_blocks)
    engine.observers.add(recorder)
    engine.generate([[5, 6, 7]], GREEDY)
    assert recorder.figures() == {"recording_failed": 0}
    Narrow.room = 20
    engine.generate([[8, 9]], GREEDY)
    assert recorder.figures() == {"recording_failed": 1}
    assert narrow.closed
    assert len(read_trace(path).requests) == 1
    with open_record(path) as file:
        Recorder(file).begin(BLOCK, engine.num_blocks)
    assert len(lines(path)) == 3


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigurationError, match="Is a directory"):
        open_record(tmp_path)
