"""What a run is asked for, as a file: `wholestep train --config run.toml`.

    model = "gpt-1m"
    data = "shakespeare"
    steps = 1200

    [set]
    lr = 0.004
    layers = 4

In: TOML whose keys are the options of `wholestep train` and whose table `[set]` is what `--set` takes. Out: the same request that
the command line would make. Every run writes one as it was resolved, so that it gives the same losses on a day when defaults
have changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wholestep.errors import BadOption, WholestepError, did_you_mean
from wholestep.graph.plan_file import toml_value
from wholestep.train import wishes

CONFIG = "run.toml"
DIGEST = "data_digest"
"""Of the data that the run was trained on; not an option, only compared."""
NAMES: dict[Any, str] = {int: "a whole number", bool: "true or false", str: "a text", list: "a list of texts"}
HEAD = """\
# What this run was asked for, with every default filled in. The same losses again:
#   wholestep train --config {file}
# The command line wins over this file. Keys are the options of `wholestep train`, [set] is what --set takes.
# {where}
"""


def read_config(path: Path, kinds: Mapping[str, Any], elsewhere: Sequence[str] = ()) -> dict[str, Any]:
    """The request in a file; a key that there is not, or a value of another kind, is one line.

    Args:
        path: the file, or the folder of a run.
        kinds: what may be asked for, and what it is.
        elsewhere: options that belong to one call and have no place in a file.
    """
    try:
        import tomllib
    except ImportError as error:  # Python 3.10
        raise WholestepError("a config file needs Python 3.11 or newer, which reads TOML") from error
    file = path / CONFIG if path.is_dir() else path
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = f"every run holds one: runs/NAME/{CONFIG}"
        raise BadOption(f"--config {path}: {error.strerror or error}", hint=hint) from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise BadOption(f"--config {path} is no TOML: {' '.join(str(error).split())}") from error
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = "sets" if key == "set" else key.replace("-", "_")
        if name == "sets":
            found[name] = _sets(value, path)
        elif name == DIGEST:
            found[name] = str(value)
        else:
            found[name] = _checked(key, name, value, path, kinds, elsewhere)
    return found


def _checked(key: str, name: str, value: Any, path: Path, kinds: Mapping[str, Any], elsewhere: Sequence[str]) -> Any:
    known = [other for other in kinds if other != "sets"]
    if name in elsewhere:
        raise BadOption(f"--config {path}: {key} is of one call", hint=f"give --{key} on the command line")
    if name not in known:
        if name in wishes.TRAINING:
            raise BadOption(f"--config {path}: {key} stands under [set]", hint=f"write [set], and below it {key} = ...")
        known.append("set")
        hint = did_you_mean(name, known, f"there are {', '.join(known)}")
        raise BadOption(f"--config {path}: there is no key {key!r}", hint=hint)
    kind = kinds[name]
    texts = kind is not list or (isinstance(value, list) and all(isinstance(entry, str) for entry in value))
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)) or not texts:
        raise BadOption(f"--config {path}: {key} = {value!r}", hint=f"give {NAMES.get(kind, 'a text')}")
    return value


def _sets(table: Any, path: Path) -> list[str]:
    """`[set]` as the texts of `--set`."""
    if not isinstance(table, dict):
        raise BadOption(f"--config {path}: set = {table!r}", hint="write a table [set] with lines key = value")
    return [set_text(key, value) for key, value in table.items()]


def set_text(key: str, value: Any) -> str:
    """`key=value`, which `--set` reads as that value."""
    plain = isinstance(value, str) and wishes.parse([f"{key}={value}"])[key] in (value, None)
    return f"{key}={value if plain else json.dumps(value)}"


def resolved(request: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A request with what it resolved to: all that makes the same run again."""
    table = {name: value for name, value in request.items() if name != "sets"}
    table |= {name: settings[name] for name in request if settings.get(name) is not None}
    table |= {"backend": request.get("backend") or "inductor", "nonfinite": request.get("nonfinite") or "stop"}
    if settings.get(DIGEST) is not None:
        table[DIGEST] = settings[DIGEST]
    table = {name: value for name, value in table.items() if value is not None and value is not False}
    values = {key: settings[key] for key in wishes.TRAINING if key in settings and key not in request}
    return {**table, "set": {**values, **(settings.get("config") or {})}}


def config_text(table: Mapping[str, Any], *, file: Path, where: str) -> str:
    """The file."""
    lines = [HEAD.format(file=file, where=where)]
    lines += [f"{name} = {toml_value(value)}" for name, value in table.items() if name != "set"]
    lines += ["", "[set]"]
    lines += [f"{_key(key)} = {toml_value('none' if value is None else value)}" for key, value in table["set"].items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else toml_value(key)
