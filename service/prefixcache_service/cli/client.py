"""The commands that talk to a running server: generate, fork, beam, tree, stats."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.tree import Tree

from prefixcache.engine.messages import SequenceInfo
from prefixcache_service.cli.config import ConfigFile, flag
from prefixcache_service.cli.stats import as_plain, as_tables
from prefixcache_service.client import Client, Stream
from prefixcache_service.limits import DEFAULT_TARGET
from prefixcache_service.requests import Branch, Prompt, Sampling
from prefixcache_service.results import Completion

Server = Annotated[str, flag("Where the server is.", metavar="HOST[:PORT]")]
Token = Annotated[
    str, flag("Who calls, where the server knows tenants; better in $PREFIXCACHE_TOKEN.")
]
Ca = Annotated[
    str, flag("Use TLS; who signs the server's certificate: a PEM file, or system.", metavar="FILE")
]
Certificate = Annotated[
    str, flag("PEM file of the client's own certificate and key, for mutual TLS.", metavar="FILE")
]
Salt = Annotated[str, flag("Cache salt: nothing is shared across salts.")]
AsJson = Annotated[bool, flag("Print JSON for programs.", "--json", envvar="PREFIXCACHE_JSON")]
Keep = Annotated[float, flag("Seconds for which the result can still be forked.")]
MaxTokens = Annotated[int, flag("Tokens to generate at most.")]
Temperature = Annotated[float, flag("0 is greedy.")]
TopP = Annotated[float, flag("Keep the likeliest tokens with this probability.")]
TopK = Annotated[int, flag("Keep so many likeliest tokens; 0 keeps all.")]
Seed = Annotated[int | None, flag("The same seed gives the same text.")]
Stop = Annotated[list[str] | None, flag("Text that ends the output; repeatable.", metavar="TEXT")]

EarlyStopping = Annotated[
    Literal["true", "false", "never"],
    flag("Whether to stop at NUM-BEAMS finished hypotheses, as in Hugging Face."),
]


def generate(  # noqa: PLR0917 (each is a flag)
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    n: Annotated[int, flag("Samples behind the one prompt.", "--n", "-n")] = 1,
    chat: Annotated[bool, flag("Send it as a user's message.")] = False,
    system: Annotated[str, flag("System message, with --chat.")] = "",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    keep: Keep = 0.0,
    salt: Salt = "",
    as_json: AsJson = False,
    server: Server = DEFAULT_TARGET,
    token: Token = "",
    ca: Ca = "",
    certificate: Certificate = "",
    config: ConfigFile = None,
) -> None:
    """Continue a prompt. Text goes to standard output, its sequence id to standard error.

    \b
      prefixcache generate "Once upon a time" --max-tokens 40
      prefixcache generate --chat "Name three rivers" --n 4 --seed 7
      prefixcache generate "The answer is" --keep 60      # and then `prefixcache fork`
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = _sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        n=n,
    )
    with Client(server, cache_salt=salt, token=token, ca=ca, certificate=certificate) as client:
        stream = client.stream(_prompt(text, chat, system), keep_seconds=keep, **sampling)
        _show(stream, [""] * n, as_json=as_json)


def fork(  # noqa: PLR0917 (each is a flag)
    sequence_id: Annotated[str, typer.Argument(help="A sequence that runs or is kept.")],
    text: Annotated[
        list[str] | None,
        flag("What a branch goes on with; one branch for each; repeatable.", metavar="TEXT"),
    ] = None,
    n: Annotated[int, flag("Branches for each text.", "--n", "-n")] = 1,
    position: Annotated[int | None, flag("Tokens of the sequence to keep; all by default.")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    keep: Keep = 0.0,
    salt: Salt = "",
    as_json: AsJson = False,
    server: Server = DEFAULT_TARGET,
    token: Token = "",
    ca: Ca = "",
    certificate: Certificate = "",
    config: ConfigFile = None,
) -> None:
    """Continue a sequence in several ways. Each starts at its end or at an earlier token.

    \b
      prefixcache fork SEQUENCE_ID --text " yes" --text " no" --max-tokens 16
      prefixcache fork SEQUENCE_ID -n 4 --position 12
    """
    texts: list[str | None] = list(text) if text else [None]
    branches = [
        Branch(sequence_id, text=one or None, position=position) for one in texts for _ in range(n)
    ]
    sampling = _sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
    )
    with Client(server, cache_salt=salt, token=token, ca=ca, certificate=certificate) as client:
        stream = client.stream_fork(branches, keep_seconds=keep, **sampling)
        _show(stream, [branch.text or "" for branch in branches], as_json=as_json)


def beam(  # noqa: PLR0917 (each is a flag)
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    num_beams: Annotated[
        int, flag("Hypotheses that are followed at once.", "--num-beams", "-b")
    ] = 4,
    num_return_sequences: Annotated[
        int, flag("Best ones to print.", "--num-return-sequences", "-n")
    ] = 1,
    chat: Annotated[bool, flag("Send it as a user's message.")] = False,
    system: Annotated[str, flag("System message, with --chat.")] = "",
    max_tokens: Annotated[int, flag("Longest hypothesis in tokens.")] = 32,
    length_penalty: Annotated[float, flag("Above 0 favours long hypotheses.")] = 1.0,
    early_stopping: EarlyStopping = "false",
    num_beam_groups: Annotated[int, flag("Groups of beams that are to differ.")] = 1,
    diversity_penalty: Annotated[float, flag("How much they are to; needs several groups.")] = 0.0,
    stop: Stop = None,
    keep: Keep = 0.0,
    salt: Salt = "",
    as_json: AsJson = False,
    server: Server = DEFAULT_TARGET,
    token: Token = "",
    ca: Ca = "",
    certificate: Certificate = "",
    config: ConfigFile = None,
) -> None:
    """Search for the likeliest continuations. They come at the end, best first.

    \b
      prefixcache beam "The capital of France is" --num-beams 8 --num-return-sequences 3
      prefixcache beam --chat "Name a river" --length-penalty 0.6 --keep 60
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with Client(server, cache_salt=salt, token=token, ca=ca, certificate=certificate) as client:
        outputs = client.beam(
            _prompt(text, chat, system),
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            num_beam_groups=num_beam_groups,
            diversity_penalty=diversity_penalty,
            early_stopping="never" if early_stopping == "never" else early_stopping == "true",
            stop=stop or (),
            keep_seconds=keep,
        ).outputs
    if as_json:
        _print_json(outputs)
    else:
        _print_texts(outputs, [""] * len(outputs))


def tree(  # noqa: PLR0917 (each is a flag)
    salt: Salt = "",
    as_json: AsJson = False,
    server: Server = DEFAULT_TARGET,
    token: Token = "",
    ca: Ca = "",
    certificate: Certificate = "",
    config: ConfigFile = None,
) -> None:
    """Show the sequences that wait, run or are kept. Each is below the one it was forked from."""
    with Client(server, cache_salt=salt, token=token, ca=ca, certificate=certificate) as client:
        sequences = client.sequences()
    if as_json:
        _print_json(sequences)
    else:
        _console().print(_tree(sequences) if sequences else "no sequences")


def stats(  # noqa: PLR0917 (each is a flag)
    as_json: AsJson = False,
    server: Server = DEFAULT_TARGET,
    token: Token = "",
    ca: Ca = "",
    certificate: Certificate = "",
    config: ConfigFile = None,
) -> None:
    """Show the pool, what the cache has saved, why not more, and what a larger pool would save."""
    with Client(server, token=token, ca=ca, certificate=certificate) as client:
        figures = client.stats()
    if as_json:
        _print_json(as_plain(figures))
    else:
        _console().print(as_tables(figures))


def _sampling(
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: list[str] | None,
    n: int = 1,
) -> Sampling:
    return Sampling(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
    )


def _prompt(text: str, chat: bool, system: str) -> Prompt:
    if not chat:
        if system:
            raise typer.BadParameter("--system needs --chat")
        return text
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": text}]


def _show(stream: Stream, beginnings: list[str], *, as_json: bool) -> None:
    """Print the text of a call: a single one as it comes, several in order at the end.

    beginnings: what was put before each text by the caller.
    """
    live = len(beginnings) == 1 and not as_json
    with stream:
        print(beginnings[0] if live else "", end="", flush=True)
        for delta in stream:
            print(delta.text if live else "", end="", flush=True)
        outputs = stream.result().outputs
    if as_json:
        _print_json(outputs)
        return
    if live:
        print()
        print(_summary(outputs[0]), file=sys.stderr)
    else:
        _print_texts(outputs, beginnings)


def _print_texts(outputs: Sequence[Completion], beginnings: Sequence[str]) -> None:
    """One after the other: text to standard output, what is known of it to standard error."""
    for output, beginning in zip(outputs, beginnings, strict=True):
        print(f"[{output.index}] {beginning}{output.text}")
        print(_summary(output), file=sys.stderr)


def _console() -> Console:
    """Where nobody looks at the width, lines are as long as they are."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=1000, highlight=False)


def _summary(output: Completion) -> str:
    kept = f", kept for {output.kept_seconds:.0f} s" if output.kept_seconds else ""
    score = "" if output.score is None else f", score {output.score:.4f}"
    where = f"on {output.address}, " if output.address else ""
    return (
        f"# {output.sequence_id}: {where}{output.num_prompt_tokens} prompt tokens "
        f"({output.num_cached_tokens} cached, {output.num_forked_tokens} forked), "
        f"{output.usage.completion_tokens} generated, {output.finish_reason}{score}{kept}"
    )


def _tree(sequences: Iterable[SequenceInfo]) -> Tree:
    root = Tree("sequences")
    nodes: dict[str, Tree] = {}
    waiting = list(sequences)
    known = {info.sequence_id for info in waiting}
    while waiting:
        later = []
        for info in waiting:
            if info.parent_id in known and info.parent_id not in nodes:
                later.append(info)  # its parent comes first
                continue
            above = nodes.get(info.parent_id, root)
            nodes[info.sequence_id] = above.add(_line(info))
        waiting = later
    return root


def _line(info: SequenceInfo) -> str:
    kept = f" {info.kept_seconds:.0f} s" if info.state == "kept" else ""
    at = f", forked at {info.fork_position}" if info.parent_id else ""
    blocks = f"{info.own_blocks} own + {info.shared_blocks} shared blocks"
    return f"{info.sequence_id}  {info.state}{kept}, {info.num_tokens} tokens{at}, {blocks}"


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
