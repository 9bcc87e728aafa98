"""Log lines: one a call, key=value, with the request id and never what was said."""

import logging

import pytest

from prefixcache.errors import InvalidArgument
from prefixcache_service.log import LOGGER_NAME, KeyValueFormatter


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger=LOGGER_NAME)
    return lambda: [KeyValueFormatter().format(record) for record in caplog.records]


def test_each_call_has_a_line_with_its_id_and_status(client, lines):
    client.generate("secret words", max_tokens=2, request_id="mine")
    client.generate("secret words", max_tokens=2)
    with pytest.raises(InvalidArgument):
        client.generate("secret words", top_p=7, request_id="wrong one")
    first, second, third = (line for line in lines() if "method=Generate" in line)
    assert " level=info event=call method=Generate request_id=mine status=OK ms=" in first
    assert len(second.split("request_id=")[1].split()[0]) == 32
    assert 'request_id="wrong one" status=INVALID_ARGUMENT' in third
    assert "secret" not in "".join(lines())


def test_a_value_cannot_forge_a_line():
    record = logging.makeLogRecord({"msg": "call", "pairs": {"request_id": 'a\nlevel=x "b"'}})
    line = KeyValueFormatter().format(record)
    assert "\n" not in line
    assert 'request_id="a\\nlevel=x \\"b\\""' in line
