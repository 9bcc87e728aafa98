"""The command line: `prefixcache serve`, `pull`, and clients of a running server.

Owns what is typed and printed. Client commands never import torch: they must answer at once.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from prefixcache.errors import PrefixCacheError
from prefixcache_service.cli import client, health, pull, serve, simulate, token, top
from prefixcache_service.cli.config import SETTINGS, flag

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""
Serve a language model whose KV cache is a tree that clients can fork.

\b
  prefixcache pull                       fetch the default model, once
  prefixcache serve                      serve it on 127.0.0.1:50051
  prefixcache generate "Once upon" --keep 60
  prefixcache fork SEQUENCE_ID --text " a time" --text " no time"
  prefixcache simulate TRACE             what other pools would give
  prefixcache top                        watch the cache at work

Each flag can also be set as an environment variable (--max-tokens as PREFIXCACHE_MAX_TOKENS) or in
a TOML file given with --config.
""",
)
app.command("serve", context_settings=SETTINGS)(serve.serve)
app.command("generate", context_settings=SETTINGS)(client.generate)
app.command("fork", context_settings=SETTINGS)(client.fork)
app.command("beam", context_settings=SETTINGS)(client.beam)
app.command("tree", context_settings=SETTINGS)(client.tree)
app.command("stats", context_settings=SETTINGS)(client.stats)
app.command("health", context_settings=SETTINGS)(health.health)
app.command("top", context_settings=SETTINGS)(top.top)
app.command("simulate", context_settings=SETTINGS)(simulate.simulate)
app.command("token", context_settings=SETTINGS)(token.token)
app.command("pull", context_settings=SETTINGS)(pull.pull)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("prefixcache"))
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        flag("Print the version.", "--version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run as a program. Exit code 1 with one sentence for errors, 2 for a wrong command line."""
    try:
        app()
    except PrefixCacheError as error:
        sys.exit(f"error: {error}")
