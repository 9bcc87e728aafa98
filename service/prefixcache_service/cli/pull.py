"""`prefixcache pull`: have a model on this machine before serving it."""

from typing import Annotated

import typer

from prefixcache.config import DEFAULT_MODEL
from prefixcache_service.cli.config import ConfigFile
from prefixcache_service.cli.progress import progress


def pull(
    model: Annotated[
        str, typer.Argument(help="smollm2 (the default model) or a hub id.", metavar="[MODEL]")
    ] = DEFAULT_MODEL,
    config: ConfigFile = None,
) -> None:
    """Fetch a model, check it, and print where it lies. What is here already is not fetched again.

    \b
      prefixcache pull
      prefixcache pull Qwen/Qwen3-0.6B
    """
    with progress() as report:
        if model == DEFAULT_MODEL:
            from prefixcache.model.default_model import pull_default_model  # noqa: PLC0415

            where = str(pull_default_model(report))
        else:
            from prefixcache.model.loader import load_checkpoint  # noqa: PLC0415 (brings in torch)

            where = load_checkpoint(model, progress=report).name
    typer.echo(where)
