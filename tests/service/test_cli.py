"""The command line against a real server: what is printed, where, and the exit code."""

import dataclasses
import inspect
import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from prefixcache.config import EngineConfig
from prefixcache.errors import PrefixCacheError
from prefixcache_service.cli import app, serve
from prefixcache_service.cli.stats import as_tables
from tests.model.checkpoints import default_model_path

PROMPT = "Hello"


@pytest.fixture
def run(server):
    """Run a command against the server; returns its result."""

    def run(*arguments):
        return CliRunner().invoke(app, [*arguments, "--server", server.target])

    return run


def test_generate_prints_the_text_and_how_to_fork_it(run, client):
    flags = ["--max-tokens", "6", "--temperature", "0"]
    result = run("generate", PROMPT, *flags, "--keep", "60")
    assert result.exit_code == 0
    text = client.generate(PROMPT, max_tokens=6, temperature=0.0).text
    assert result.stdout == text + "\n"
    sequence_id = result.stderr.split()[1].rstrip(":")
    assert "kept for 60 s" in result.stderr
    forked = run("fork", sequence_id, "--text", " yes", "--text", " no", *flags)
    assert forked.exit_code == 0
    assert forked.stdout.startswith("[0] ")
    assert "\n[1] " in forked.stdout
    tree = run("tree")
    assert sequence_id in tree.stdout
    assert "kept" in tree.stdout


def test_json_is_for_programs(run, client):
    flags = ["--n", "2", "--seed", "3", "--max-tokens", "4", "--json"]
    outputs = json.loads(run("generate", PROMPT, *flags).stdout)
    same = client.generate(PROMPT, n=2, seed=3, max_tokens=4)
    assert [tuple(o["token_ids"]) for o in outputs] == [o.token_ids for o in same.outputs]
    assert json.loads(run("stats", "--json").stdout)["blocks_total"] == 512
    assert json.loads(run("tree", "--json").stdout) == []


def test_beam_prints_the_best_first_and_their_scores(run, client):
    flags = ["--num-beams", "3", "--num-return-sequences", "2", "--max-tokens", "5"]
    result = run("beam", PROMPT, *flags, "--early-stopping", "never", "--length-penalty", "0.5")
    same = client.beam(
        PROMPT, num_beams=3, num_return_sequences=2, max_tokens=5, early_stopping="never",
        length_penalty=0.5,
    ).outputs  # fmt: skip
    assert result.stdout == f"[0] {same[0].text}\n[1] {same[1].text}\n"
    assert f"score {same[1].score:.4f}" in result.stderr.splitlines()[1]
    (output,) = json.loads(run("beam", PROMPT, "--max-tokens", "3", "--json").stdout)
    assert output["score"] < 0
    assert run("beam", PROMPT, "--early-stopping", "maybe").exit_code == 2
    groups = ["--num-beam-groups", "2", "--diversity-penalty", "0.5", "-b", "4", "-n", "4"]
    assert len(run("beam", PROMPT, *groups).stdout.splitlines()) >= 4


def test_tables_and_trees_are_for_people(run, client):
    assert run("tree").stdout == "no sequences\n"
    assert "hit rate" in run("stats").stdout
    parent = client.generate(PROMPT, max_tokens=2, keep_seconds=60)
    run("fork", parent.sequence_id, "--keep", "60", "--max-tokens", "2")
    lines = run("tree").stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].index(parent.sequence_id) < lines[2].index("kept") - 32
    assert "forked at" in lines[2]


def test_stats_show_no_times_before_there_are_any(client):
    client.generate([1, 2, 3], max_tokens=2)
    stats = client.stats()
    early = dataclasses.replace(stats, histograms=())
    for shown, times in ((stats, True), (early, False)):
        console = Console(width=100, file=io.StringIO())
        console.print(as_tables(shown))
        assert ("9 of 10" in console.file.getvalue()) is times


def test_chat_and_standard_input(server, client):
    arguments = ["generate", "-", "--chat", "--system", "Be brief", "--max-tokens", "2"]
    result = CliRunner().invoke(app, [*arguments, "--server", server.target], input="Hi")
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert f"{len(client.tokenize(chat))} prompt tokens" in result.stderr


def test_flags_come_from_the_environment_and_a_file(run, tmp_path, monkeypatch):
    file = tmp_path / "flags.toml"
    file.write_text('max-tokens = 3\ntemperature = 0\njson = true\nstop = ["zzz"]\n')
    (output,) = json.loads(run("generate", PROMPT, "--config", str(file)).stdout)
    assert len(output["token_ids"]) == 3
    monkeypatch.setenv("PREFIXCACHE_MAX_TOKENS", "2")
    (output,) = json.loads(run("generate", PROMPT, "--config", str(file)).stdout)
    assert len(output["token_ids"]) == 2
    arguments = ["generate", PROMPT, "--config", str(file), "--max-tokens", "1"]
    (output,) = json.loads(run(*arguments).stdout)
    assert len(output["token_ids"]) == 1
    file.write_text("max-tokns = 3\n")
    result = run("generate", PROMPT, "--config", str(file))
    assert result.exit_code == 2
    assert "--max-tokns" in result.stderr


def test_errors_are_one_sentence(run):
    result = run("fork", "nobody")
    assert isinstance(result.exception, PrefixCacheError)
    command = [sys.executable, "-c", "from prefixcache_service.cli import main; main()"]
    done = subprocess.run(
        [*command, "stats", "--server", "127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no server answers")
    assert done.stderr.count("\n") == 1
    assert run("generate", PROMPT, "--max-tokens", "many").exit_code == 2
    assert run("generate").exit_code == 2
    assert run("generate", PROMPT, "--system", "Be brief.").exit_code == 2  # without --chat


def test_pull_says_where_the_default_model_lies():
    path = default_model_path()
    result = CliRunner().invoke(app, ["pull"])
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")


def test_client_commands_do_not_wait_for_torch():
    code = "import sys, prefixcache_service.cli as c; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_serve_has_a_flag_for_each_setting_of_the_engine_with_the_same_default():
    parameters = inspect.signature(serve.serve).parameters
    for field in dataclasses.fields(EngineConfig):
        if field.name == "limits":  # --limit, repeatable
            continue
        assert parameters[field.name].default == field.default, field.name


@pytest.mark.parametrize(
    "command", ["serve", "generate", "fork", "beam", "tree", "stats", "health", "pull"]
)
def test_help_is_complete(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--config" in result.stdout
    assert "…" not in result.stdout.replace("4 … 128", "")
