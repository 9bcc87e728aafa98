"""Reading traces: what a good line means, and what is said of a bad one."""

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from prefixcache.errors import TraceError
from prefixcache.simulate import formats
from prefixcache.simulate.formats import read_trace

MOONCAKE = '{"timestamp": 500, "input_length": 1000, "output_length": 7, "hash_ids": [3, 4]}'
AZURE = "2023-11-16 18:15:46.6805900,374,44"
HEADER = {"prefixcache_trace": 1, "started": 100.0, "block_size": 16, "num_blocks": 64}
RECORD = {
    "arrival": 1.0,
    "admitted": 1.5,
    "sequences": [{"prompt": 40, "output": 10, "filled": 49, "blocks": "0" * 15 + "1" + "a" * 32}],
}


def write(directory: Path, *lines: str | dict[str, object] | bytes) -> Path:
    path = directory / "trace"
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    path.write_bytes(b"\n".join(t if isinstance(t, bytes) else t.encode() for t in texts))
    return path


def test_mooncake_lines_name_their_blocks(tmp_path):
    later = MOONCAKE.replace("500", "2500")
    trace = read_trace(write(tmp_path, later, MOONCAKE, ""))
    assert (trace.format, trace.block_size, trace.seconds) == ("mooncake", 512, 2.0)
    record = trace.sequences[0]
    assert (record.prompt_tokens, record.output_tokens, record.prompt_blocks) == (1000, 7, 2)
    assert record.blocks.tolist() == [3, 4]


def test_azure_lines_are_lengths(tmp_path):
    path = write(
        tmp_path,
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens",
        AZURE,
        "2023-11-16 18:15:48.1805900+00:00, 5, 0\r",
    )
    trace = read_trace(path)
    assert (trace.format, trace.block_size, trace.has_blocks) == ("azure", None, False)
    lengths = [(s.prompt_tokens, s.output_tokens) for s in trace.sequences]
    assert lengths == [(374, 44), (5, 0)]
    assert trace.seconds == pytest.approx(1.5)


def test_recorded_requests_come_in_the_order_of_admission(tmp_path):
    early = {**RECORD, "arrival": 1.2, "admitted": 1.3, "priority": -2}
    trace = read_trace(write(tmp_path, HEADER, RECORD, early))
    assert (trace.format, trace.block_size, trace.pool_blocks) == ("prefixcache", 16, 64)
    assert [r.priority for r in trace.requests] == [-2, 0]
    assert [r.arrival for r in trace.requests] == pytest.approx([0.2, 0.0])
    assert [r.admitted for r in trace.requests] == pytest.approx([0.3, 0.5])
    assert trace.sequences[0].blocks.tolist() == [1, *[0xAAAAAAAAAAAAAAAA] * 2]


def test_a_second_run_of_the_server_goes_on_with_the_file(tmp_path):
    again = {**HEADER, "started": 200.0, "num_blocks": 32}
    trace = read_trace(write(tmp_path, HEADER, RECORD, again, RECORD))
    assert [r.arrival for r in trace.requests] == [0.0, 100.0]
    assert trace.pool_blocks == 32


def test_beams_that_were_no_result_take_room(tmp_path):
    record = {**RECORD, "beams": 4, "sequences": RECORD["sequences"] * 2}
    request = read_trace(write(tmp_path, HEADER, record)).requests[0]
    assert [len(s.blocks) for s in request.sequences] == [3, 3, 2, 2]
    assert [s.sample for s in request.sequences] == [False, False, True, True]


def test_only_so_many_requests_are_read(tmp_path):
    path = write(tmp_path, *[MOONCAKE] * 5, "this is not looked at")
    assert len(read_trace(path, limit=5).requests) == 5


def mooncake(**fields: object) -> str:
    return json.dumps({**json.loads(MOONCAKE), **fields})


def record(**fields: object) -> str:
    return json.dumps({**RECORD, "sequences": [{**RECORD["sequences"][0], **fields}]})


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (MOONCAKE, "{", "is no JSON"),
        (MOONCAKE, "[]", "is no JSON object"),
        (MOONCAKE, "[" * 100_000, "is no JSON"),
        (MOONCAKE, b"\xff\xfe", "is not UTF-8 text"),
        (MOONCAKE, mooncake(timestamp=-1), "timestamp is -1, which is negative"),
        (MOONCAKE, mooncake(timestamp=10**400), "timestamp is 1000"),
        (MOONCAKE, mooncake(timestamp=float("nan")), "timestamp is nan"),
        (MOONCAKE, mooncake(timestamp=True), "timestamp is True, not a number"),
        (MOONCAKE, mooncake(input_length=0), "input_length is 0; it must be from 1"),
        (MOONCAKE, mooncake(input_length=1.5), "input_length is 1.5, not a whole number"),
        (MOONCAKE, mooncake(output_length=None), "output_length is missing"),
        (MOONCAKE, mooncake(hash_ids="3"), "hash_ids must be a list"),
        (MOONCAKE, mooncake(hash_ids=[3, 2**64]), "hash_ids must be a list"),
        (MOONCAKE, mooncake(hash_ids=[3]), "1 hash_ids for input_length 1000: 2 blocks of 512"),
        (AZURE, "2023-11-16 18:15:46,374", "2 fields; TIMESTAMP,ContextTokens,GeneratedTokens"),
        (AZURE, "yesterday,374,44", "TIMESTAMP is 'yesterday', not a date and time"),
        (AZURE, "2023-11-16 18:15:46,-4,44", "'-4' is no number of tokens"),
        (AZURE, "2023-11-16 18:15:46,0,44", "ContextTokens must be at least 1"),
        (record(), {"prefixcache_trace": 2}, "is of version 2; this program reads 1"),
        (record(), {**HEADER, "block_size": 32}, "block_size changes from 16 to 32"),
        (record(), {**RECORD, "sequences": []}, "at least one sequence"),
        (record(), {**RECORD, "sequences": [1]}, "sequences must be a list of objects"),
        (record(), {**RECORD, "priority": 2**40}, "priority is 1099511627776"),
        (record(), record(filled=99), "filled is 99, more than prompt and output"),
        (record(), record(blocks="00"), "blocks must be a string of 16 hexadecimal digits"),
        (record(), record(blocks="0" * 16), "blocks holds 1 digests; its lengths need 3"),
        (record(), record(blocks="z" * 48), "blocks holds other characters"),
        (AZURE, f"2023-11-16 18:15:46,{'9' * 5000},4", "is no number of tokens"),
        (record(), {**RECORD, "beams": 10**9}, "beams is 1000000000; it must be from 0 to 65536"),
        (record(), record(keep=-1), "keep is -1, which is negative"),
    ],
)
def test_a_malformed_line_is_named_with_its_reason_or_skipped(tmp_path, good, bad, reason):
    first = {MOONCAKE: good, AZURE: "TIMESTAMP,ContextTokens,GeneratedTokens"}.get(good, HEADER)
    path = write(tmp_path, first, good, bad, good)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert reason in str(error.value)
    trace = read_trace(path, skip_bad=True)
    of_bad_run = isinstance(bad, dict) and "prefixcache_trace" in bad
    assert trace.skipped == 1 + of_bad_run
    assert len(trace.requests) == (3 if good is MOONCAKE else 2) - of_bad_run


def test_a_record_before_any_header_is_malformed(tmp_path):
    with pytest.raises(TraceError, match=":1: comes before a header"):
        read_trace(write(tmp_path, RECORD), "prefixcache")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ((), "is empty"),
        (("", " "), "is empty"),
        ((gzip.compress(MOONCAKE.encode()),), "is compressed: unpack it first"),
        (("hello",), "begins like no known trace"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens",), "holds no request"),
        ((HEADER,), "holds no request"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, lines, reason):
    with pytest.raises(TraceError, match=reason):
        read_trace(write(tmp_path, *lines))


def test_lines_that_were_all_skipped_are_said(tmp_path):
    with pytest.raises(TraceError, match="holds no request; 2 malformed lines were skipped"):
        read_trace(write(tmp_path, "{", "{"), "mooncake", skip_bad=True)


@pytest.mark.parametrize("kind", ["auto", "mooncake"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, kind):
    with pytest.raises(TraceError, match="missing: cannot be read: No such file"):
        read_trace(tmp_path / "missing", kind)
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path, kind)


def test_behind_a_header_that_is_wrong_nothing_is_of_the_run_before_it(tmp_path):
    path = write(tmp_path, HEADER, RECORD, {**HEADER, "block_size": 8}, RECORD, HEADER, RECORD)
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.requests), trace.skipped) == (2, 2)


def test_a_pipe_is_read_whole(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lines = "\n".join([MOONCAKE] * 3000)  # more than one buffer
    writer = threading.Thread(target=pipe.write_text, args=(lines,))
    writer.start()
    assert len(read_trace(pipe).requests) == 3000
    writer.join()


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1000)
    with pytest.raises(TraceError, match=":2: is too long for a line"):
        read_trace(write(tmp_path, MOONCAKE, "0" * 2000))


def test_a_format_can_be_forced(tmp_path):
    with pytest.raises(TraceError, match="is no JSON"):
        read_trace(write(tmp_path, AZURE), "mooncake")
