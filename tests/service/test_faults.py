"""Faults that were found by attacking a server, each with the smallest thing that shows it."""

import pytest

from prefixcache.errors import InvalidArgument
from prefixcache_service import strict
from prefixcache_service.v1 import prefixcache_pb2 as pb

GROUP = b"\xa3\x06" + b"\x08\x01" + b"\xa4\x06"  # field 100, which no message has


def test_two_members_of_a_oneof_are_found_behind_an_unknown_group():
    text = pb.GenerateRequest(text="one").SerializeToString()
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])).SerializeToString()
    for data in (GROUP + text + ids, text + GROUP + ids):
        with pytest.raises(InvalidArgument) as caught:
            strict.parse(pb.GenerateRequest, data)
        assert caught.value.field == "token_ids"
    assert strict.parse(pb.GenerateRequest, GROUP + ids).token_ids.ids == [1]
