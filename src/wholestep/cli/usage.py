"""What the argument parser refuses, as one line that says what to do.

The parser's own suggestions go by letters alone, dashes included: for `--lr` it names `--plan`. Here a training value is found
under `--set`, and an option only where its name is near.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import typer.core

from wholestep.errors import BadOption, did_you_mean

MAY_BE_EMPTY = ("prompt",)


class Command(typer.core.TyperCommand):
    """A command that refuses an empty value, which the parser would take in silence. Of an option given twice the last counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, parameters = self.make_parser(ctx).parse_args(args=list(args))
        refuse_empty(given, parameters)
        return super().parse_args(ctx, args)


def refuse_empty(given: Mapping[str, Any], parameters: Sequence[Any]) -> None:
    """`given`: texts by the names of parameters."""
    for parameter in parameters:
        value = given.get(parameter.name)
        texts = value if isinstance(value, (list, tuple)) else [value]
        if "" in texts and parameter.name not in MAY_BE_EMPTY:
            named = next((n for n in parameter.opts if n.startswith("--")), parameter.metavar or parameter.name)
            raise BadOption(f"{named} is an empty text", hint="give it a value, or leave it out")


def refuse_no_numbers(values: Mapping[str, Any]) -> None:
    """nan is neither below the least value nor above the largest, and so passes the parser."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadOption(f"--{name.replace('_', '-')} {value}", hint="give a number")


def explained(error: Any) -> str:
    """What to print after `wholestep: `; empty where the parser has printed the help already."""
    named = getattr(error, "option_name", None)
    if named and hasattr(error, "possibilities"):  # no such option
        return str(unknown_option(named, error.ctx))
    text = " ".join(str(error.format_message()).split())
    command = getattr(getattr(error, "ctx", None), "command_path", None)
    missing = getattr(error, "param", None) is not None and text.startswith("Missing")
    return f"{text} See {command} --help." if missing and command else text


def unknown_option(named: str, context: Any) -> BadOption:
    """The error for an option that the command does not have."""
    options = [option for parameter in context.command.params for option in getattr(parameter, "opts", ())]
    options = [option for option in options if option.startswith("--")]
    word = named.lstrip("-").partition("=")[0]
    what = f"there is no option {named}"
    near = did_you_mean(word, [option[2:] for option in options], shown="--{}", cutoff=0.7)
    if "--set" in options:
        from wholestep.train.wishes import TRAINING

        key = word.replace("-", "_")
        near = did_you_mean(key, TRAINING, near, shown="--set {}=VALUE", cutoff=1.0 if near else 0.7)
    return BadOption(what, hint=near or f"see {context.command_path} --help")
