"""The options of fxsched.backend, checked: what each may be, and what goes together."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import torch
from torch.optim import Optimizer

from .capture.caller import parts
from .costmodel.measure import Profile
from .ir.loss_scale import Scale
from .ir.request import (
    BatchNorm,
    Carry,
    CheckInputs,
    CutWord,
    LossReduction,
    Order,
    Pairs,
    PassedRows,
    Ragged,
    Request,
    Shards,
    StageCompiler,
    Transport,
)
from .jobs.job import PlanError
from .jobs.schedule import Schedule
from .jobs.user_values import is_int, is_number, shown
from .passes.model_passes import ModelPass
from .passes.users import Pass
from .runtime.input_agreement import InputRule
from .runtime.recorder import Recorder
from .schedules import LIBRARY
from .schedules.arguments import one_of

Word = TypeVar("Word", bound=str)

SUM_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WORDS: dict[str, tuple[str | None, ...]] = {
    "order": get_args(Order),
    "carry": get_args(Carry),
    "loss_reduction": get_args(LossReduction),
    "pairs": get_args(Pairs),
    "batch_norm": (None, *get_args(BatchNorm)),
    "stage_compiler": get_args(StageCompiler),
    "ragged": get_args(Ragged),
    "rows": get_args(PassedRows),
    "transport": (None, *get_args(Transport)),
    "check_inputs": get_args(CheckInputs),
}


@dataclass(frozen=True)
class Options:
    """What a backend does: the request that is planned, and how its plans run.

    measured: what stages are cut by, if it isn't estimates alone.
    record: whether steps note when each job started and ended.
    inputs: how ranks come to run on the same inputs.
    recorder: of the last calls, for flight_record=.
    Other fields are the options of fxsched.backend, checked.
    """

    request: Request
    transport: Transport | None
    stage_compiler: StageCompiler
    passes: tuple[Pass, ...]
    measured: Profile | None
    record: bool
    inputs: InputRule
    timeout: float | None
    loss_scale: Scale | None
    optimizer: Optimizer | None
    recorder: Recorder | None = None
    model_passes: tuple[ModelPass, ...] = ()


def checked_schedule(schedule: object) -> Schedule:
    """The schedule; PlanError for anything else."""
    if isinstance(schedule, Schedule):
        return schedule
    such = "gpipe(workers=4, microbatches=8)"
    if isinstance(schedule, str) and schedule in LIBRARY:
        such = f"{LIBRARY[schedule].__name__}(..)"
    raise PlanError(
        f"backend(schedule={shown(schedule)}): give a Schedule, such as "
        f"fxsched.schedules.{such}"
    )


def check_keywords(
    call: str, model: Callable[..., Any], names: Iterable[str], options: Iterable[str]
) -> None:
    """Raises PlanError for names that are arguments neither of the model nor of a call
    with these options."""
    try:
        takes = inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):  # of some functions it isn't known
        return
    if any(taken.kind is taken.VAR_KEYWORD for taken in takes.values()):
        return
    for name in (name for name in names if name not in takes):
        near = difflib.get_close_matches(name, [*takes, *options], 1)
        hint = f"did you mean {near[0]}=?" if near else "leave it out"
        raise PlanError(
            f"{call}({name}=): neither an option of fxsched.{call} nor an argument of "
            f"the model; {hint}"
        )


def uncalled(*inputs: object) -> NoReturn:
    """What torch.compile(model, backend=fxsched.backend) gets: the error, in the first
    call of the model."""
    raise PlanError(
        "torch.compile(backend=fxsched.backend) names the function; give what it "
        "makes, torch.compile(model, backend=fxsched.backend(schedule))"
    )


def flight_recorder(folder: str | PathLike[str] | None) -> Recorder | None:
    """What keeps the flight record that goes to this folder."""
    if folder is None:
        return None
    path = fspath(folder) if isinstance(folder, (str, PathLike)) else ""
    if not isinstance(path, str) or not path or Path(path).is_file():
        raise PlanError(f"backend(flight_record={folder!r}): give a folder, or None")
    return Recorder(Path(path))


def check_words(**options: str | None) -> None:
    """Raises PlanError for an option that isn't one of its words."""
    for name, word in options.items():
        one_of("backend", name, word, WORDS[name])


def check_local_rows(
    rows: PassedRows,
    ragged: Ragged,
    input_from: int | None,
    loss_reduction: LossReduction,
) -> None:
    """Raises PlanError for what rows="local" doesn't go with."""
    whole = ragged != "error" or input_from is not None or loss_reduction == "weighted"
    if rows == "local" and whole:
        raise PlanError(
            "backend(rows='local') doesn't go with ragged=, input_from= or "
            "loss_reduction='weighted', which need the whole batch on every rank"
        )


def stage_names(stages: object) -> str | tuple[str, ...]:
    """ "auto", or the names of modules that start stages."""
    if isinstance(stages, str):
        if stages == "auto":
            return stages
        raise PlanError(
            f"backend(stages={stages!r}): give 'auto' or a list of module names, such "
            f"as [{stages!r}]"
        )
    names = tuple(stages) if isinstance(stages, Iterable) else (stages,)
    if not names or not all(isinstance(name, str) for name in names):
        raise PlanError(
            f"backend(stages={list(names)!r}): give 'auto' or a list of names of "
            "modules"
        )
    return names


def flag(option: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise PlanError(f"backend({option}={value!r}): give True or False")
    return value


def sum_type(gradient_dtype: object) -> torch.dtype | None:
    """The type that gradients are added up in, if it isn't the parameters'."""
    if gradient_dtype is None or gradient_dtype in SUM_TYPES:
        return gradient_dtype
    names = ", ".join(map(str, SUM_TYPES))
    raise PlanError(
        f"backend(gradient_dtype={gradient_dtype!r}): give one of {names}, or None for "
        "the parameters' own"
    )


def message_type(dtype: object) -> torch.dtype | None:
    """The type that values travel in between jobs."""
    if dtype is None or dtype in (torch.bfloat16, torch.float16, torch.float32):
        return dtype
    raise PlanError(
        f"backend(message_dtype={dtype!r}): give torch.bfloat16, torch.float16, "
        "torch.float32 (for models in float64), or None"
    )


def look_ahead(prefetch: int) -> int:
    """Jobs ahead that weights are asked for."""
    if not is_int(prefetch) or prefetch < 0:
        raise PlanError(f"backend(prefetch={prefetch!r}): give an int, 0 or more")
    return prefetch


def source_rank(input_from: int | None, workers: int) -> int | None:
    """The rank whose inputs all take, if there is one."""
    if input_from is None or (is_int(input_from) and 0 <= input_from < workers):
        return input_from
    raise PlanError(
        f"backend(input_from={input_from!r}): give a rank, 0 to {workers - 1}"
    )


def above_zero(option: str, value: float | None, unit: str) -> float | None:
    """A number of that unit, if it is given."""
    if value is not None and not (is_number(value) and value > 0):
        raise PlanError(f"backend({option}={value!r}): give {unit}, above 0")
    return value


def measured_profile(profile: object) -> Profile | None:
    """What was measured; None, where there is only to say whether to record."""
    if isinstance(profile, Profile):
        return profile
    if profile is None or isinstance(profile, bool):
        return None
    raise PlanError(
        f"backend(profile={profile!r}): give True, or what fxsched.profile(model, "
        "*inputs) measured"
    )


def checked_passes(passes: object, option: str = "passes") -> tuple[Pass, ...]:
    """The user's passes."""
    if not isinstance(passes, (tuple, list)) or not all(map(callable, passes)):
        graph = "program" if option == "passes" else "gm"
        raise PlanError(
            f"backend({option}={passes!r}): give a list of functions ({graph}, "
            f"request) -> {graph}"
        )
    return tuple(passes)


def cut_words(shards: object, schedule: Schedule) -> Shards:
    """ "auto", or how weights of modules are cut, by patterns of their names."""
    if shards == "auto":
        return "auto"
    example = '{"blocks.*.attention.query": "column", "blocks.*.attention.out": "row"}'
    if not isinstance(shards, Mapping) or not shards:
        raise PlanError(
            f"backend(shards={shards!r}): give 'auto', or such as {example}"
        )
    words: list[tuple[str, CutWord]] = []
    for name, word in shards.items():
        if not isinstance(name, str) or word not in get_args(CutWord):
            raise PlanError(
                f"backend(shards={{{name!r}: {word!r}}}): give names of modules, in "
                "which * stands for any, with 'column', 'row', 'expert' or 'sequence', "
                f"such as {example}"
            )
        words.append((name, word))
    if schedule.shards == 1:
        raise PlanError(
            "backend(shards=) says which weights are cut, but the schedule has one "
            f"shard; give it fxsched.schedules.sharded({schedule.name or 'schedule'}, "
            "2), or leave shards= out"
        )
    return tuple(words)


def check_shards(request: Request) -> None:
    """Raises PlanError for what shards don't go with."""
    if request.schedule.shards == 1:
        return
    others = {
        "average_every= (a shard has no replica of what all shards read)": (
            request.schedule.average_every is not None
        ),
        "updates in order of arrival (take order='static')": request.by_arrival,
        "deterministic=True (shards add up gradients in another order)": (
            request.deterministic
        ),
    }
    for what, given in others.items():
        if given:
            raise PlanError(
                f"Schedule(shards={request.schedule.shards}) doesn't go with {what}; "
                "leave one of them out"
            )


def stage_groups(same_stage: object) -> tuple[tuple[str, ...], ...]:
    """Groups of names of modules that stay in one stage."""
    groups = same_stage if isinstance(same_stage, (list, tuple)) else [same_stage]
    for group in groups:
        if (
            not isinstance(group, (list, tuple))
            or len(group) < 2
            or not all(isinstance(name, str) for name in group)
        ):
            raise PlanError(
                f"backend(same_stage={same_stage!r}): give groups of two or more names "
                "of modules, such as [['encoder.embed', 'head']]"
            )
    return tuple(map(tuple, groups))


def sample_dims(batch_dims: object) -> dict[str | int, int | None]:
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


def reductions(
    argument: str, value: object, allowed: Sequence[Word]
) -> dict[Any, Word]:
    """A copy of a dict of choices by name; PlanError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PlanError(
            f"backend({argument}={value!r}): give a dict of names, such as "
            f"{{'name': {allowed[0]!r}}}"
        )
    for name, how in value.items():
        one_of("backend", f"{argument}[{name!r}]", how, allowed)
    return dict(value)


def compile_options_error(options: Mapping[str, object]) -> PlanError | None:
    """The error for what torch.compile was given besides the backend, if anything."""
    if not options:
        return None
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return PlanError(
        f"torch.compile({words}) is for Inductor; leave it out, or take "
        "fxsched.backend(schedule, stage_compiler='inductor') to compile stages with it"
    )


def check_deterministic(request: Request, stage_compiler: StageCompiler) -> None:
    """Raises PlanError for what has other bits under other schedules."""
    others = {
        "order='dynamic' with Schedule(ahead=) steps in order of arrival; take "
        "order='static'": request.by_arrival,
        "Schedule(average_every=) averages replicas that step by themselves; leave it "
        "out": request.schedule.average_every is not None,
        "stage_compiler='inductor' rounds as it fuses, and fuses stage by stage; take "
        "'eager'": stage_compiler == "inductor",
        "pairs='spread' adds up gradients of embeddings by rows; take 'joint'": (
            request.pairs == "spread"
        ),
        "message_dtype= rounds what goes from worker to worker, which the schedule "
        "decides; leave it out": request.message_dtype is not None,
    }
    for other in (other for other, asked in others.items() if asked):
        if request.deterministic:
            raise PlanError(f"backend(deterministic=True): {other}")


def check_updates(request: Request, optimizer: object) -> None:
    """Raises PlanError for options of updates without an optimizer, and for what does
    not go with one."""
    if not isinstance(request.skip_nonfinite, bool):
        raise PlanError(
            f"backend(skip_nonfinite={request.skip_nonfinite!r}): give True or False"
        )
    schedule = request.schedule
    parted = schedule.update_every not in (None, schedule.microbatches)
    parted |= schedule.average_every is not None
    if parted and request.loss_reduction == "weighted":
        raise PlanError(
            "backend(loss_reduction='weighted') weighs rows over the whole batch, and "
            f"an update every {schedule.update_every} microbatches sees only its own; "
            "take update_every=None, or another loss_reduction"
        )
    if optimizer is not None:
        if request.scaled:
            raise PlanError(
                "backend(optimizer=, loss_scale=): a GradScaler's step is not in the "
                "program; train in bfloat16, or leave optimizer= out"
            )
        return
    asked = {
        "clip_grad_norm=": request.clip_grad_norm is not None,
        "skip_nonfinite=": request.skip_nonfinite,
    }
    for name in (name for name, wanted in asked.items() if wanted):
        raise PlanError(
            f"{name} is about updates in the program; give it the optimizer too, "
            "backend(schedule, optimizer=optimizer)"
        )
