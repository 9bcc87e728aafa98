"""Errors and statuses are one table, read in both directions; messages fit into headers."""

import grpc
import pytest

from prefixcache import errors
from prefixcache.engine.messages import Output, TokenLogprobs
from prefixcache_service import render, status

CALLER_ERRORS = [
    getattr(errors, name)
    for name in (
        *("NotFound", "AlreadyExists", "FailedPrecondition", "ResourceExhausted"),
        *("Unavailable", "Unimplemented", "Cancelled", "Internal"),
    )
]


@pytest.mark.parametrize("kind", CALLER_ERRORS)
def test_an_error_comes_back_as_itself(kind):
    code = status.status_of(kind("why"))
    back = status.error_from(code, "why")
    assert (type(back), str(back)) == (kind, "why")


def test_a_wrong_field_comes_back_with_its_name():
    error = errors.InvalidArgument("sampling.top_p", "must be in (0, 1]")
    back = status.error_from(status.status_of(error), str(error), status.details_of(error))
    assert (back.field, back.message) == (error.field, error.message)


def test_errors_outside_the_table_are_internal_and_unknown_codes_the_base():
    assert status.status_of(errors.ModelError("x")) is grpc.StatusCode.INTERNAL
    assert type(status.error_from(grpc.StatusCode.DATA_LOSS, "x")) is errors.PrefixCacheError
    assert isinstance(status.error_from(grpc.StatusCode.DEADLINE_EXCEEDED, "x"), errors.Cancelled)


class Reset:
    """How gRPC tells of a stream that a stopping server has reset."""

    def code(self):
        return grpc.StatusCode.CANCELLED

    def details(self):
        return "CANCELLED"

    def trailing_metadata(self):
        return None


def test_a_call_that_a_stopping_server_resets_is_not_taken_for_the_callers_own_doing():
    assert isinstance(status.error_from_call(Reset()), errors.Unavailable)


def test_long_messages_fit_into_headers():
    error = errors.InvalidArgument("chat.messages", "词" * 5000)
    assert len(status.shortened(str(error)).encode()) <= 800
    ((_, data),) = status.details_of(error)
    assert len(data) < 2000


def test_many_prompt_logprobs_travel_in_several_messages():
    """GR-01: no message of ours comes near the limit, however long the prompt."""
    top = tuple((token, -1.0) for token in range(64))
    entries = (None, *[TokenLogprobs(1, -1.0, top)] * 4000)
    event = Output("r", 0, (5,), "x", (), entries)
    messages = list(render.responses(event, lambda token: b"token"))
    assert [len(message.chunk.prompt_logprobs) for message in messages] == [1024] * 3 + [929, 0]
    assert messages[-1].chunk.token_ids == [5]
    assert max(message.ByteSize() for message in messages) < 3 << 20
