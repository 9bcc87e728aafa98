"""What the proto promises: nothing that a client was made from leaves or changes its meaning."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTO = "prefixcache_service/v1/prefixcache.proto"
TEXT = (ROOT / "protos" / PROTO).read_text()

SCRIPT = """
import sys
from pathlib import Path
import breaking, generate
folder, old = map(Path, sys.argv[1:])
generate.describe(folder, folder / "new.binpb")
print(*breaking.changes(folder / "new.binpb", old), sep="\\n")
"""


def changes(folder, old, new):
    """What the check says of the proto in which `old` stands as `new`."""
    assert TEXT.count(old) == 1, old
    path = folder / PROTO
    path.parent.mkdir(parents=True)
    path.write_text(TEXT.replace(old, new))
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    command.append(str(ROOT / "protos" / "prefixcache.v1.binpb"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "protos")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  int32 priority = 9;\n", "", "priority"),
        ("  int32 priority = 9;\n", "  reserved 9;\n", "priority"),
        ("  int32 priority = 9;\n", "  int32 priority = 10;\n", "priority"),
        ("  int32 priority = 9;\n", "  int32 urgency = 9;\n", "priority"),
        ("  int32 priority = 9;\n", "  int64 priority = 9;\n", "type"),
        ("  int32 priority = 9;\n", "  repeated int32 priority = 9;\n", "cardinality"),
        ("  optional int32 max_tokens = 12;\n", "  int32 max_tokens = 12;\n", "max_tokens"),
        ("  optional double score = 8;\n", "  optional Usage score = 8;\n", "score"),
        ("  FINISH_REASON_ABORT = 3;\n", "", '"FinishReason"'),
        ("  FINISH_REASON_ABORT = 3;\n", "  FINISH_REASON_ABORT = 4;\n", '"FinishReason"'),
        ("  rpc Score(ScoreRequest) returns (ScoreResponse);\n", "", "Score"),
        ("returns (ScoreResponse)", "returns (stream ScoreResponse)", "Score"),
        ("rpc Score(ScoreRequest)", "rpc Score(PinPrefixRequest)", "Score"),
        ("package prefixcache.v1;", "package prefixcache.v2;", "package"),
    ],
)
def test_each_kind_of_breaking_change_is_caught_and_named(old, new, said, tmp_path):
    assert said in changes(tmp_path, old, new)


def test_what_only_adds_breaks_nobody(tmp_path):
    added = "  int32 priority = 9;\n  // New.\n  optional string region = 10;\n"
    assert changes(tmp_path, "  int32 priority = 9;\n", added) == ""


def test_the_reference_has_every_call_message_and_value():
    page = (ROOT / "docs" / "api-reference.md").read_text()
    for name in (
        "### Generate\n",
        "### GenerateRequest\n",
        "`FINISH_REASON_ABORT`",
        "### CacheEvent",
    ):
        assert name in page
    assert "| `keep_seconds` | 7 | double | How long each finished sequence" in page
    assert "map<uint32, double>" in page
    assert "At most one of `text`, `token_ids`, `chat` (`prompt`)." in page
