"""What protobuf would let pass or report without a name is refused by name."""

import pytest

from prefixcache.errors import InvalidArgument
from prefixcache_service import strict
from prefixcache_service.v1 import prefixcache_pb2 as pb

TEXT = pb.GenerateRequest(text="one").SerializeToString()
IDS = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])).SerializeToString()
BEAM = pb.GenerateRequest(beam_search=pb.BeamSearchParams()).SerializeToString()
SAMPLING = pb.GenerateRequest(sampling=pb.SamplingParams(n=2)).SerializeToString()


def nested(first: pb.ForkBranch, second: pb.ForkBranch) -> bytes:
    """A ForkRequest whose second branch holds the fields of both."""
    both = first.SerializeToString() + second.SerializeToString()
    good = pb.ForkRequest(branches=[pb.ForkBranch(parent_sequence_id="p")]).SerializeToString()
    return good + bytes([2 << 3 | 2, len(both)]) + both


@pytest.mark.parametrize(
    ("kind", "data", "field"),
    [
        (pb.GenerateRequest, TEXT + IDS, "token_ids"),
        (pb.GenerateRequest, IDS + TEXT, "text"),
        (pb.GenerateRequest, TEXT + SAMPLING + BEAM, "beam_search"),
        (
            pb.ForkRequest,
            nested(pb.ForkBranch(text="a"), pb.ForkBranch(token_ids=pb.TokenIds(ids=[1]))),
            "branches[1].token_ids",
        ),
        # A lone surrogate, as a careless encoder would write it.
        (pb.GenerateRequest, b"\x12\x03\xed\xa0\x80", "text"),
        (pb.GenerateRequest, b"\x22\x07\x0a\x05\x12\x03\xed\xa0\x80", "chat.messages[0].content"),
        (pb.GenerateRequest, TEXT + b"\x42\x02\xff\xfe", "cache_salt"),
        (pb.GenerateRequest, b"\x12\xff", "request"),
        (pb.GenerateRequest, b"\xff" * 40, "request"),
    ],
)
def test_names_the_field_at_fault(kind, data, field):
    """GR-06: both prompt kinds, and text that is no text, are INVALID_ARGUMENT with the field."""
    with pytest.raises(InvalidArgument) as caught:
        strict.parse(kind, data)
    assert caught.value.field == field


def test_repeated_members_and_unknown_fields_pass():
    twice = TEXT + pb.GenerateRequest(text="two").SerializeToString()
    assert strict.parse(pb.GenerateRequest, twice).text == "two"
    newer = TEXT + b"\xfa\x3e\x01x"  # field 1007, of a later version
    assert strict.parse(pb.GenerateRequest, newer).text == "one"


def test_optional_fields_are_no_oneof():
    params = pb.SamplingParams(seed=1, stream_key=2, temperature=0)
    request = pb.GenerateRequest(text="x", sampling=params)
    assert strict.parse(pb.GenerateRequest, request.SerializeToString()) == request
