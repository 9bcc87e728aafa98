"""The committed stubs are those of the proto."""

import dataclasses
import subprocess
import sys
from pathlib import Path

from prefixcache.params import BeamSearchParams, SamplingParams
from prefixcache_service import BeamSearch, Sampling
from prefixcache_service.calls import SERVICE
from prefixcache_service.v1 import prefixcache_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_current():
    command = [sys.executable, str(ROOT / "protos" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_field_of_the_proto_that_is_not_plain_has_a_comment():
    """The proto is the API reference: each call and each message part says what it is."""
    lines = (ROOT / "protos" / "prefixcache_service" / "v1" / "prefixcache.proto").read_text()
    for method in SERVICE.methods:
        before = lines.split(f"  rpc {method.name}(")[0].rstrip().splitlines()
        assert before[-1].strip().startswith("//"), method.name
    assert len(SERVICE.methods) == 13
    assert pb.DESCRIPTOR.package == "prefixcache.v1"


def test_parameters_have_the_same_fields_in_engine_proto_and_client():
    for params, message, options in (
        (SamplingParams, pb.SamplingParams, Sampling),
        (BeamSearchParams, pb.BeamSearchParams, BeamSearch),
    ):
        names = {field.name for field in dataclasses.fields(params)}
        assert names == set(message.DESCRIPTOR.fields_by_name) == set(options.__annotations__)
