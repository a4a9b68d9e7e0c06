"""The command line: `fxsched` and `python -m fxsched`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..jobs import PlanError
from . import commands, model_commands
from .option_types import choose, nearest


class Group(click.Group):
    """The commands, in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            names = ", ".join(self.commands)
            text = f"the following arguments are required: command ({names})"
            raise click.UsageError(text, ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            near = choose(args[0], self.commands)
            raise click.UsageError(f"there is no command {args[0]!r} {near}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; every error says which one it is about."""
        try:
            return super().invoke(ctx)
        except PlanError as error:
            raise click.UsageError(str(error), _called(ctx)) from error
        except click.UsageError as error:
            error.ctx = error.ctx or _called(ctx)
            raise


def _called(ctx: click.Context) -> click.Context:
    name = ctx.invoked_subcommand or ""
    return click.Context(group.commands[name], ctx, name)


HELP = """Parallel training as one placement function and one priority function.

Each command says what it takes: fxsched simulate --help.
"""

SETTINGS = {"show_default": True, "max_content_width": 88}

group = Group(help=HELP, context_settings=SETTINGS)
for command in (
    commands.simulate,
    commands.compare,
    model_commands.search,
    model_commands.plan,
    commands.check_table1,
    commands.train,
):
    group.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command.

    Exits with code 2 and one line for what cannot be done, 130 for Ctrl-C, and
    quietly with code 1 where what reads the output has gone.
    """
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
        click.echo(f"{command}: error: {_one_line(error)}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except BrokenPipeError:
        # the interpreter flushes once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if code:
        sys.exit(code)


def _one_line(error: click.ClickException) -> str:
    message = error.message
    if isinstance(error, click.MissingParameter) and error.param is not None:
        what = getattr(error.param, "help", None) or model_commands.MODEL
        message = f"{_name(error.param)} is needed: {what}"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        message = f"{_name(error.param)}: {message}"
    elif isinstance(error, click.NoSuchOption):
        message = f"there is no option {error.option_name}"
        if near := nearest(error.option_name, error.possibilities or ()):
            message += f"; did you mean {near}?"
    return " ".join(message.split())


def _name(parameter: click.Parameter) -> str:
    """How a user writes it: --steps, MODEL."""
    if isinstance(parameter, click.Option):
        return parameter.opts[0]
    return parameter.human_readable_name
