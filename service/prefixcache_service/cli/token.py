"""`prefixcache token`: a fresh token for a tenant, and what the tokens file says of it."""

import sys
from typing import Annotated

import typer

from prefixcache_service.cli.config import ConfigFile
from prefixcache_service.tenants import entry_for, fresh_token


def token(
    name: Annotated[str, typer.Argument(help="The tenant.")], config: ConfigFile = None
) -> None:
    """Make a token. It is shown once, on standard error; the file's entry is on standard output.

    \b
      prefixcache token alice >> tokens.toml
      prefixcache serve --tokens tokens.toml
    """
    fresh = fresh_token()
    print(entry_for(name, fresh), end="")
    print(f"token of {name}, shown this once: {fresh}", file=sys.stderr)
