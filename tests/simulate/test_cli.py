"""`prefixcache simulate` as a user runs it, on a synthetic trace whose answer is known."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixcache.errors import PrefixCacheError
from prefixcache_service.cli import app
from tests.model.checkpoints import write_checkpoint, write_gguf

COUNT, SHARED, OWN = 20, 3, 2


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """COUNT prompts of SHARED common blocks and OWN more."""
    lines = [
        {
            "timestamp": 100 * index,
            "input_length": (SHARED + OWN) * 512,
            "output_length": 40,
            "hash_ids": [*range(SHARED), *range(100 + OWN * index, 100 + OWN * (index + 1))],
        }
        for index in range(COUNT)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    if result.exception is not None and isinstance(result.exception, PrefixCacheError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def figures(*arguments: object) -> dict[str, object]:
    return json.loads(run(*arguments, "--json").splitlines()[-1])


def test_the_hit_rate_is_what_the_shared_blocks_say(trace):
    found = figures(trace, "--blocks", "5,64")
    expected = (COUNT - 1) * SHARED / (COUNT * (SHARED + OWN))
    for point in found["hit_rate"]:
        assert point["lru"] == point["ours"] == point["bound"] == pytest.approx(expected)
    assert [point["blocks"] for point in found["hit_rate"]] == [5, 64]
    assert found["trace"]["distinct_blocks"] == SHARED + COUNT * OWN


def test_without_sizes_they_reach_from_the_longest_request_to_all_blocks(trace):
    sizes = [point["blocks"] for point in figures(trace)["hit_rate"]]
    assert (sizes[0], sizes[-1]) == (SHARED + OWN, SHARED + COUNT * OWN)


def test_a_pool_larger_than_all_that_is_asked_is_not_built(trace):
    found = figures(
        trace, "--blocks", "1000,2000000000", "--gpu-memory", "900TiB", "--bytes-per-token", 1
    )
    small, huge = found["hit_rate"]
    assert {**huge, "blocks": 1000} == small
    assert found["plan"]["pool_blocks"] == int(0.9 * 900 * 2**40) // 512


def test_a_plan_says_what_fits_and_how_fast_with_its_assumptions(trace, tmp_path):
    config = tmp_path / "config.json"
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
    }
    config.write_text(json.dumps(fields))
    found = figures(trace, "--gpu-memory", "32MiB", "--model", config, "--dtype", "float32")
    plan = found["plan"]
    parameters = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 2 * 1000 * 64
    pool = (int(0.9 * 2**25) - 4 * parameters) // (2 * 2 * 32 * 4 * 512)
    assert plan["pool_blocks"] == pool
    assert plan["sequences_that_fit"] == pytest.approx(pool * 512 / (5 * 512 + 40))
    assert plan["output_tokens_per_second"] > 0
    assert any("roofline" in sentence for sentence in found["assumptions"])
    text = run(trace, "--gpu-memory", "1GiB", "--bytes-per-token", 1000)
    assert "time is counted in steps" in " ".join(text.split())


def test_a_gguf_header_gives_the_plan_of_the_models_own_configuration(trace, tmp_path):
    directory = write_checkpoint(tmp_path / "tiny", "llama")
    file = write_gguf(tmp_path / "tiny.gguf", directory, "Q8_0")
    plans = [
        figures(trace, "--gpu-memory", "64MiB", "--model", path)["plan"]
        for path in (directory, directory / "config.json", file)
    ]
    assert [plan.pop("model") for plan in plans] == ["tiny", "tiny", "tiny.gguf"]
    assert plans[0]["output_tokens_per_second"] > 0
    assert plans[0] == plans[1] == plans[2]


def test_pictures_are_written_as_png_and_as_one_page_that_loads_nothing(trace, tmp_path):
    png, page = tmp_path / "figures.png", tmp_path / "report.html"
    run(trace, "--gpu-memory", "1GiB", "--bytes-per-token", 1000, "--png", png, "--html", page)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert "http" not in text.split("base64,")[0]
    assert "Belady" in text


def test_malformed_lines_end_it_or_are_counted(trace):
    trace.write_text(trace.read_text() + "\n{broken\n")
    with pytest.raises(PrefixCacheError, match=f"trace.jsonl:{COUNT + 1}: is no JSON"):
        run(trace)
    assert figures(trace, "--skip-bad")["trace"]["skipped_lines"] == 1
    assert "1 malformed lines skipped" in " ".join(run(trace, "--skip-bad").split())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--blocks", "0"], "no list of pool sizes"),
        (["--blocks", "many"], "no list of pool sizes"),
        (["--gpu-memory", "1GiB"], "goes with --model or"),
        (["--bytes-per-token", "10"], "goes with --model or"),
        (["--max-num-batched-tokens", "8"], "at least --max-num-seqs"),
        (["--limit", "0"], "limit"),
    ],
)
def test_a_wrong_flag_is_named(trace, flags, reason):
    assert reason in " ".join(run(trace, *flags, code=2).replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--block-size", "100"], "block_size: .* no multiple"),
        (["--gpu-memory", "1KiB", "--bytes-per-token", "1000"], "leave no block"),
        (["--png", "/nowhere/at/all.png"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(trace, flags, reason):
    with pytest.raises(PrefixCacheError, match=reason):
        run(trace, *flags)
