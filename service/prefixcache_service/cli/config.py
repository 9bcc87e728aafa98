"""Where flags come from besides the command line: environment and configuration file.

The command line goes before PREFIXCACHE_…, that before --config FILE, and that before defaults.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {"auto_envvar_prefix": "PREFIXCACHE", "show_default": True}

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """A number of bytes: 2147483648, 512M or 2GiB."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        return int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no number of bytes, such as 2GiB") from None


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Take defaults of this command's flags from a TOML file; names as on the command line."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    flags = {
        option.removeprefix("--"): parameter.name
        for parameter in context.command.params
        for option in parameter.opts
    }
    defaults = {}
    for key, value in values.items():
        name = flags.get(key.replace("_", "-"))
        if name is None:
            raise typer.BadParameter(f"{path}: `{context.info_name}` has no flag --{key}")
        defaults[name] = value
    context.default_map = defaults
    return path


def flag(text: str, *names: str, **settings: Any) -> Any:
    """A flag with its help; its variable is PREFIXCACHE_ and its name, which help says once."""
    return typer.Option(*names, help=text, show_envvar=False, **settings)


ConfigFile = Annotated[
    Path | None,
    flag(
        "TOML file with defaults for these flags, for example: max-tokens = 32",
        "--config",
        callback=_read,
        is_eager=True,
        metavar="FILE",
    ),
]
