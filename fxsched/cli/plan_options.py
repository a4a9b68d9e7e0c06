"""Options of fxsched.backend that a plan depends on, on the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

import click

from .option_types import dims
from .options import flag

OBJECTS = ("passes", "model_passes", "optimizer", "profile")  # none of text
FLAGS = {"stages": "--modules", "shards": "--cut"}  # --stages and --shards: how many


class PlanCommand(click.Command):
    """A command that takes these options too; what they are is in fxsched.options,
    which imports torch and is read once it is asked for them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All of its options, its own first."""
        *own, last = super().get_params(ctx)  # last is --help
        known = {option for param in own for option in param.opts}
        return [*own, *(p for p in _planned().values() if p.opts[0] not in known), last]


class ModelCommand(PlanCommand):
    """A command that takes these options where it gets --model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments of the command."""
        ctx.obj = names_model(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All of its options, its own first."""
        return (
            super().get_params(ctx) if ctx.obj else click.Command.get_params(self, ctx)
        )


def names_model(args: Sequence[str]) -> bool:
    """Whether a command line has --model."""
    return any(each.partition("=")[0] == "--model" for each in args)


def planned_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given, by their names in fxsched.backend; if a command has an
    option of that name itself, its value."""
    given = {
        name: options.get(f"plan_{name}", options.get(name)) for name in _planned()
    }
    return {name: value for name, value in given.items() if value is not None}


@cache
def _planned() -> dict[str, click.Option]:
    from ..options import PLANNED, Options

    hints, text = get_type_hints(Options), inspect.getdoc(Options) or ""
    texts = dict(re.findall(r"^(\w+): ((?:.+\n?)(?: {4}.+\n?)*)", text, re.M))
    return {
        name: _option(name, hints[name], getattr(Options, name), texts[name])
        for name in PLANNED
        if name not in OBJECTS
    }


def _option(name: str, hint: Any, default: Any, text: str) -> click.Option:
    said = " ".join(text.split()).removeprefix('"auto", or ')
    # of words that are allowed all, else what it is
    said = re.split(r"\.(?: |$)" if said.startswith('"') else r"[.:;](?: |$)", said)[0]
    if isinstance(default, (int, str)) and not isinstance(default, bool):
        said += f"  [default: {default}]"
    names = [FLAGS.get(name, flag(name)), f"plan_{name}"]
    if hint is bool:
        return click.Option(names, is_flag=True, default=None, help=said)
    kind, shown = READ.get(name) or (_type(hint), None)
    return click.Option(names, type=kind, metavar=shown, help=said)


def _type(hint: Any) -> Any:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if set(kinds) <= {int, float}:
        return kinds[0]
    words = [word for kind in kinds for word in get_args(kind) or (kind,)]
    return click.Choice([str(word) for word in words])


def _dtype(text: str) -> Any:
    import torch

    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise click.BadParameter(
            f"{text!r} is no torch.dtype; give one such as bfloat16"
        )
    return found


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _groups(text: str) -> list[list[str]]:
    """a+b,c+d: two groups of names."""
    return [part.split("+") for part in _listed(text)]


def _words(text: str) -> dict[str, str] | str:
    """name=word,name=word; or a word alone."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in _listed(text)]
    if wrong := [name for name, _, word in pairs if not (name and word)]:
        raise click.BadParameter(f"{wrong[0]!r} has no word; give name=word,name=word")
    return {name: word for name, _, word in pairs}


def _types(text: str) -> dict[str, Any]:
    """kind=type,kind=type."""
    words = _words(text)
    if isinstance(words, str):
        raise click.BadParameter(f"{text!r}: give such as gradients=int8,weights=int8")
    return {kind: _dtype(word) for kind, word in words.items()}


PAIRS = _words, "NAME=WORD,.."
READ: dict[str, tuple[Callable[[str], Any], str]] = {
    "stages": (_listed, "NAME,.."),
    "same_stage": (_groups, "NAME+NAME,.."),
    "batch_dims": (dims, "NAME=DIM,.."),
    **{"shards": PAIRS, "buffers": PAIRS, "outputs": PAIRS, "carry": PAIRS},
    "network": (str, "FILE"),
    **{"gradient_dtype": (_dtype, "TYPE"), "encode": (_types, "KIND=TYPE,..")},
}
