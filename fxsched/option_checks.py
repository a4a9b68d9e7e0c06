"""What single options of fxsched.backend may be.

Each check takes an option's name and its value, and gives the value that is kept, which
it would take too. It raises PlanError for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch.optim import Optimizer

from .capture.caller import parts
from .clock.network import Network, Wires
from .ir.encodings import AS_IT_IS, TYPES, Encode
from .ir.loss_scale import read_scale
from .ir.request import (
    BufferReduction,
    Carried,
    Carry,
    CutWord,
    OutputReduction,
    Shards,
)
from .jobs.job import PlanError
from .jobs.schedule import Schedule
from .jobs.user_values import is_int, is_number, shown
from .params.updates import checked_optimizer
from .partition.measure import Profile
from .schedules import LIBRARY
from .schedules.arguments import one_of

Check = Callable[[str, Any], Any]
Word = TypeVar("Word", bound=str)

SUM_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def words(*allowed: str | None) -> Check:
    """One of some words."""

    def check(name: str, value: str | None) -> str | None:
        one_of("backend", name, value, allowed)
        return value

    return check


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise PlanError(f"backend({name}={value!r}): give True or False")
    return value


def above_zero(unit: str) -> Check:
    """A number of that unit, if it is given."""

    def check(name: str, value: float | None) -> float | None:
        if value is not None and not (is_number(value) and value > 0):
            raise PlanError(f"backend({name}={value!r}): give {unit}, above 0")
        return value

    return check


def checked_schedule(name: str, schedule: object) -> Schedule:
    """The schedule; PlanError for anything else."""
    if isinstance(schedule, Schedule):
        return schedule
    such, by_name = "gpipe(workers=4, microbatches=8)", ""
    if isinstance(schedule, str) and schedule in LIBRARY:
        such = f"{LIBRARY[schedule].__name__}(..)"
        by_name = (
            '; torch.compile(model, backend="fxsched", options={"schedule": '
            f'"{schedule}", "workers": 2, "microbatches": 4}}) takes a name'
        )
    raise PlanError(
        f"backend(schedule={shown(schedule)}): give a Schedule, such as "
        f"fxsched.schedules.{such}{by_name}"
    )


def stage_names(name: str, stages: object) -> str | tuple[str, ...]:
    """ "auto", or the names of modules that start stages."""
    if isinstance(stages, str):
        if stages == "auto":
            return stages
        raise PlanError(
            f"backend(stages={stages!r}): give 'auto' or a list of module names, such "
            f"as [{stages!r}]"
        )
    names = tuple(stages) if isinstance(stages, Iterable) else (stages,)
    if not names or not all(isinstance(each, str) for each in names):
        raise PlanError(
            f"backend(stages={list(names)!r}): give 'auto' or a list of names of "
            "modules"
        )
    return names


def stage_groups(name: str, same_stage: object) -> tuple[tuple[str, ...], ...]:
    """Groups of names of modules that stay in one stage."""
    groups = same_stage if isinstance(same_stage, (list, tuple)) else [same_stage]
    for group in groups:
        if (
            not isinstance(group, (list, tuple))
            or not group
            or not all(isinstance(each, str) for each in group)
        ):
            raise PlanError(
                f"backend(same_stage={same_stage!r}): give groups of names of modules, "
                "such as [['encoder.embed', 'head']]"
            )
    return tuple(map(tuple, groups))


def look_ahead(name: str, prefetch: int | None) -> int | None:
    """Jobs ahead that weights are asked for."""
    if prefetch is not None and (not is_int(prefetch) or prefetch < 0):
        raise PlanError(
            f"backend(prefetch={prefetch!r}): give an int, 0 or more, or None for 1, "
            "and 2 between several hosts"
        )
    return prefetch


def sample_dims(name: str, batch_dims: object) -> dict[str | int, int | None]:
    """The dimension with the samples, by argument; None for what all share."""
    if batch_dims is None:
        return {}
    if not isinstance(batch_dims, Mapping):
        raise PlanError(
            f"backend(batch_dims={batch_dims!r}): give a dict, such as "
            '{"cand": 0, "x": 1, "scale": None}'
        )
    for key, dim in batch_dims.items():
        if not (parts(key) if isinstance(key, str) else is_int(key)):
            raise PlanError(
                f"backend(batch_dims={{{key!r}: ..}}): name an argument, or give its "
                "position"
            )
        if dim is not None and not is_int(dim):
            raise PlanError(
                f"backend(batch_dims={{{key!r}: {dim!r}}}): give a dimension, or None "
                "for what all microbatches share"
            )
    return {
        key if isinstance(key, str) else int(key): None if dim is None else int(dim)
        for key, dim in batch_dims.items()
    }


def reductions(allowed: Sequence[Word]) -> Check:
    """A dict of choices by name."""

    def check(name: str, value: object) -> dict[Any, Word]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise PlanError(
                f"backend({name}={value!r}): give a dict of names, such as "
                f"{{'name': {allowed[0]!r}}}"
            )
        for key, how in value.items():
            one_of("backend", f"{name}[{key!r}]", how, allowed)
        return dict(value)

    return check


def functions(graph: str) -> Check:
    """The user's passes over a graph that they call so."""

    def check(name: str, passes: object) -> tuple[Any, ...]:
        if not isinstance(passes, (tuple, list)) or not all(map(callable, passes)):
            raise PlanError(
                f"backend({name}={passes!r}): give a list of functions ({graph}, "
                f"request) -> {graph}"
            )
        return tuple(passes)

    return check


def profiled(name: str, profile: object) -> Profile | bool | None:
    """What was measured, or whether to record."""
    if profile is None or isinstance(profile, (bool, Profile)):
        return profile
    raise PlanError(
        f"backend(profile={profile!r}): give True, or what fxsched.profile(model, "
        "*inputs) measured"
    )


def folder(name: str, path: object) -> str | None:
    """A folder, if it is given."""
    if path is None:
        return None
    text = fspath(path) if isinstance(path, (str, PathLike)) else ""
    if not isinstance(text, str) or not text or Path(text).is_file():
        raise PlanError(f"backend({name}={path!r}): give a folder, or None")
    return text


def scale(name: str, scaler: object) -> object:
    """A GradScaler, a number or a function."""
    read_scale(scaler)
    return scaler


def stepped(name: str, optimizer: object) -> Optimizer | None:
    """An optimizer that a program can step, if it is given."""
    return checked_optimizer(optimizer)


def sum_type(name: str, gradient_dtype: object) -> torch.dtype | None:
    """The type that gradients are added up in, if it isn't the parameters'."""
    if gradient_dtype is None or gradient_dtype in SUM_TYPES:
        return gradient_dtype
    names = ", ".join(map(str, SUM_TYPES))
    raise PlanError(
        f"backend(gradient_dtype={gradient_dtype!r}): give one of {names}, or None for "
        "the parameters' own"
    )


def encodings(name: str, kinds: object) -> Encode:
    """The type in which values of each kind travel."""
    if isinstance(kinds, Encode):
        return kinds
    given = kinds if isinstance(kinds, Mapping) else {"": kinds}
    for kind, dtype in {} if kinds is None else given.items():
        if kind not in Encode._fields or dtype not in TYPES:
            shown = f"{{{kind!r}: {dtype!r}}}" if kind else repr(kinds)
            raise PlanError(
                f"backend(encode={shown}): give a dict from 'activations', 'weights' "
                "or 'gradients' to torch.bfloat16, torch.float16, torch.float32 "
                "(for float64) or torch.int8; or None"
            )
    return Encode(**given) if kinds else AS_IT_IS


def cut_words(name: str, shards: object) -> Shards:
    """ "auto", or how weights of modules are cut, by patterns of their names."""
    if shards == "auto" or isinstance(shards, tuple):
        return shards  # a tuple is one that was checked
    example = '{"blocks.*.attention.query": "column", "blocks.*.attention.out": "row"}'
    if not isinstance(shards, Mapping) or not shards:
        raise PlanError(
            f"backend(shards={shards!r}): give 'auto', or such as {example}"
        )
    words: list[tuple[str, CutWord]] = []
    for pattern, word in shards.items():
        if not isinstance(pattern, str) or word not in get_args(CutWord):
            raise PlanError(
                f"backend(shards={{{pattern!r}: {word!r}}}): give names of modules, in "
                "which * stands for any, with 'column', 'row', 'expert' or 'sequence', "
                f"such as {example}"
            )
        words.append((pattern, word))
    return tuple(words)


def carried(name: str, carry: Any) -> Carried:
    """What B gets: a word, a function of the stage, or words by names of modules."""
    checked: Carried = carry
    if callable(carry) or isinstance(carry, tuple):
        return checked  # a tuple is one that was checked before
    words, allowed = [carry], get_args(Carry)
    if isinstance(carry, Mapping):
        words, allowed = list(carry.values()), allowed[1:]
    if not words or any(word not in allowed for word in words):
        raise PlanError(
            f"backend(carry={carry!r}): give 'auto', 'saved', 'recompute', a function "
            "of the stage that returns 'saved' or 'recompute', or a dict from names of "
            "modules, in which * stands for any, to one of these two"
        )
    return tuple(carry.items()) if isinstance(carry, Mapping) else checked


def wires(name: str, network: object) -> Wires | None:
    """A Network or Link, or the file of one."""
    if network is None or isinstance(network, Wires):
        return network
    if isinstance(network, (str, PathLike)):
        return Network.load(network)
    raise PlanError(
        f"backend(network={network!r}): give a fxsched.Network or Link, a file that "
        "`fxsched network` wrote, or None"
    )


CHECKS: dict[str, Check] = {  # of options that are neither words nor bools
    "schedule": checked_schedule,
    "stages": stage_names,
    "passes": functions("program"),
    "carry": carried,
    "memory_limit": above_zero("bytes"),
    "same_stage": stage_groups,
    "profile": profiled,
    "prefetch": look_ahead,
    "input_from": lambda name, rank: rank,  # by the schedule; see conflicts
    "batch_dims": sample_dims,
    "buffers": reductions(get_args(BufferReduction)),
    "outputs": reductions(get_args(OutputReduction)),
    "timeout": above_zero("seconds"),
    "loss_scale": scale,
    "optimizer": stepped,
    "clip_grad_norm": above_zero("a norm"),
    "flight_record": folder,
    "gradient_dtype": sum_type,
    "encode": encodings,
    "shards": cut_words,
    "model_passes": functions("gm"),
    "network": wires,
}
