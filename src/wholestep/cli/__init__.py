"""The command line: one file per command. Exit code 0 on success, 1 when what it checks does not hold, 2 on bad input.

A bad input is one line on stderr, never a traceback. The commands import what they need when they run: `--help` is quick.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, TextIO

import typer

from wholestep.cli import (
    bench,
    compare,
    doctor,
    evaluate,
    explain,
    export,
    failure,
    options,
    plan,
    profile,
    sample,
    search,
    show,
    train,
    usage,
    verify,
)
from wholestep.errors import WholestepError, WholestepWarning, is_out_of_memory

NOT_YET = ("tune",)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 96},
)


class Stopped(Exception):
    """A signal ended the command. The argument parser has its own way with KeyboardInterrupt, which says nothing."""


def _stoppable(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def called(*args: Any, **kwargs: Any) -> None:
        usage.refuse_no_numbers(kwargs)
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt as error:
            raise Stopped(getattr(error, "number", signal.SIGINT)) from error

    return called


COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "train": (train, "train a model; without arguments, a small one"),
    "sample": (sample, "write a text with a trained model"),
    "eval": (evaluate, "loss, perplexity or accuracy of a trained model"),
    "export": (export, "a trained model for transformers and other programs"),
    "verify": (verify, "compare the captured step with eager PyTorch"),
    "plan": (plan, "will it fit? without a GPU, in seconds"),
    "show": (show, "print the graph of the whole step, as Python"),
    "explain": (explain, "what a run did, or what a plan says"),
    "profile": (profile, "measure one step: a page with pictures, and what to do"),
    "bench": (bench, "measure training steps of many domains"),
    "search": (search, "the fastest of many ways to run a model, few of them measured"),
    "compare": (compare, "what moved between two results of bench, or two recipes"),
    "doctor": (doctor, "what this machine has and lacks"),
}
for _name, (_module, _help) in COMMANDS.items():
    app.command(_name, short_help=_help, epilog=_module.EXAMPLES, cls=usage.Command)(_stoppable(_module.command))


def _print_version(asked: bool) -> None:
    if asked:
        from wholestep import __version__

        typer.echo(f"wholestep {__version__}")
        raise typer.Exit(0)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A holistic compiler for training PyTorch models.

    \b
    Examples:
      wholestep train
      wholestep sample runs/gpt-1m-shakespeare --prompt "To be"
      wholestep verify gpt-1m --steps 2
      wholestep plan llama-1b --batch 8 --seq 2048 --device h200 --memory 26GiB
      wholestep show gpt-1m | less

    MODEL is a preset (`gpt-1m`), `hf:<model_type>`, a folder with a config.json, a run, or `package.module:callable`, a function
    that returns (model, loss_fn, optimizer, example_batch). Exit code: 0 success, 1 what was checked does not hold or
    training had to stop, 2 bad input.
    """


def main() -> None:
    """Entry point: an error meant for the user is one line and an exit code, never a traceback."""
    warnings.showwarning = _show_warning
    # torch logs a traceback for every shape error while capturing; the error itself is told once, by us or by the user's code
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: False)
    try:
        _refuse_what_is_not_built(sys.argv[1:])
        code = app(standalone_mode=False, prog_name="wholestep")
        sys.stdout.flush()
    except WholestepError as error:
        sys.exit(_fail(str(error)))
    except BrokenPipeError:  # `wholestep show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Stopped as stopped:
        options.say("stopped at once; nothing was saved since the last checkpoint, if there was one")
        sys.exit(128 + int(stopped.args[0]))
    except Exception as error:
        if is_out_of_memory(error):
            options.say(failure.out_of_memory(error))
            sys.exit(1)
        if not hasattr(error, "format_message"):  # not one of the argument parser's own
            sys.exit(_fail(failure.last_words(error)))
        text = usage.explained(error)
        if text:  # without arguments the parser has printed the help already
            _fail(text)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str) -> int:
    options.say(" ".join(text.split()))
    return 2


def _refuse_what_is_not_built(arguments: list[str]) -> None:
    if arguments and arguments[0] in NOT_YET:
        raise WholestepError(f"`wholestep {arguments[0]}` is not part of this version", hint="see wholestep --help")


def _show_warning(
    message: Any,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings as one line, without the place in our code; those of others as Python shows them."""
    if issubclass(category, WholestepWarning):
        text = f"wholestep: note: {message}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)
