"""The command line: `fxsched` and `python -m fxsched`."""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..jobs.job import PlanError
from . import (
    blame_command,
    commands,
    model_commands,
    network_command,
    stability_command,
)
from .plan_options import FLAGS, names_model


class CommandGroup(click.Group):
    """The commands, in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which they were added."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; what cannot be done is an error of that command."""
        given = [*ctx.args]
        try:
            return super().invoke(ctx)
        except PlanError as error:
            name = ctx.invoked_subcommand or ""
            called = click.Context(
                self.commands[name], ctx, name, obj=names_model(given)
            )
            said = _in_its_words(str(error), called, given)
            raise click.UsageError(said, called) from error


def _in_its_words(text: str, called: click.Context, given: Sequence[str]) -> str:
    """An error's text, with the options that it names as they are typed:
    `search(workers=2)` and `backend(schedule, ragged='pad')` become `--workers 2` and
    `--ragged pad`. A dict, which isn't typed so, stays; so does what a schedule's file
    says, which the user changes there.

    given: the words after the command.
    """
    flags: dict[str, str] = {}
    for option in called.command.get_params(called):
        if isinstance(option, click.Option) and option.name:
            flags.setdefault(option.name.removeprefix("plan_"), option.opts[0])
    for word, value in pairwise(given):
        if word == "--schedule" and (":" in value or value.endswith(".json")):
            flags.pop("microbatches", None)
    value = r"""(?:'[^'{]*'|[\w.+-]*(?![\w.+'"{\[(-]))"""
    given = rf"\b(?:{'|'.join(flags)})={value}"

    def typed(match: re.Match[str]) -> str:
        name, _, text = match[0].partition("=")
        word = text.strip("'").removeprefix("torch.")
        return f"{flags[name]} {word}".removesuffix(" True").rstrip()

    call = rf"[\w.]+\((?:schedule, )?({given}(?:, {given})*)\)"
    named = rf"\b(?:{'|'.join(flags)})(?= names )"
    text = re.sub(named, lambda match: FLAGS.get(match[0], flags[match[0]]), text)
    return re.sub(given, typed, re.sub(call, r"\1", text))


HELP = """Simulate, compare and plan schedules of parallel training.

fxsched COMMAND --help lists the options of a command, as in fxsched simulate --help.
"""

PATIENCE = 2.0  # seconds before it is said
SETTINGS = {"show_default": True, "max_content_width": 88}

VERSIONS = (
    f"fxsched {__version__}, PyTorch {version('torch')}, "
    f"Python {platform.python_version()}"
)

group = CommandGroup(help=HELP, context_settings=SETTINGS, no_args_is_help=False)
for command in (
    commands.simulate,
    commands.compare,
    model_commands.search,
    model_commands.plan,
    model_commands.recommend,
    network_command.network,
    stability_command.stability,
    blame_command.blame,
    commands.train,
):
    group.add_command(command)
click.version_option(__version__, message=VERSIONS)(group)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command.

    Exits with code 2 and one line for what cannot be done, 130 for Ctrl-C, and
    quietly with code 1 where what reads the output has gone.
    """
    waits = threading.Timer(PATIENCE, say_import)
    waits.daemon = True
    waits.start()
    program = "fxsched"
    if Path(sys.argv[0]).stem != program:
        program = "python -m fxsched"
    try:
        code = group.main(arguments, program, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        command = ctx.command_path if ctx else program
        line = error.format_message()
        if near := getattr(error, "possibilities", None):  # click sorts them by name
            line = f"{error.message} Did you mean {' or '.join(map(repr, near))}?"
        line = " ".join(line.split())
        if error.__cause__ is None:  # of click's, which don't say what to do
            line = f"{line.rstrip('.')}{' See' if line[-1] in '?)' else '; see'}"
            line += f" {command} --help"
        click.echo(f"{command}: error: {line}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except BrokenPipeError:
        # the interpreter flushes once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        waits.cancel()
    if code:
        sys.exit(code)


def say_import() -> None:
    """Says on stderr that PyTorch is being imported, if it is: what is planned says
    itself how far it is."""
    imported = "fxsched.planning" in sys.modules
    if "torch" in sys.modules and not imported and os.environ.get("RANK", "0") == "0":
        print("fxsched: importing PyTorch", file=sys.stderr, flush=True)
