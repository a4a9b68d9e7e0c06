"""backend="fxsched": from torch.compile's options to a schedule and its backend.

    torch.compile(model, backend="fxsched", options={"schedule": "1f1b", "workers": 4,
    "microbatches": 8})

The entry point torch_dynamo_backends of pyproject.toml names NAMED.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import fx

from .backend import Backend, backend
from .capture.dynamo import configure_dynamo
from .jobs.job import PlanError
from .jobs.schedule import Schedule
from .jobs.user_values import is_count, is_int
from .options import NAMES
from .schedules import LIBRARY, sharded
from .schedules.saved import load_schedule

EXAMPLE = '{"schedule": "1f1b", "workers": 4, "microbatches": 8}'


class NamedBackend:
    """What torch.compile finds under the name.

    Each call of torch.compile gets a Backend of its own, made by Dynamo's side with the
    first frame that it compiles; see capture/dynamo.py.
    """

    def from_compile(self, given: Mapping[str, Any]) -> Backend:
        """The backend of a call of torch.compile.

        given: its mode= and options=, as far as there are any.
        Raises PlanError, with what is allowed, for what neither the schedule nor
        fxsched.backend takes.
        """
        if "mode" in given:
            raise PlanError(
                f'torch.compile(backend="fxsched", mode={given["mode"]!r}): mode= is '
                f"for Inductor; leave it out, and give options={EXAMPLE}"
            )
        options = dict(given.get("options") or {})
        if "schedule" not in options:
            raise PlanError(
                f'torch.compile(backend="fxsched") needs a schedule: options={EXAMPLE}'
                f"; a Schedule, a file that Schedule.save wrote, or one of "
                f"{', '.join(LIBRARY)}"
            )
        schedule, rest = _schedule(options.pop("schedule"), options)
        if is_int(rest.get("shards")):  # else which weights are cut, for the backend
            schedule = sharded(schedule, rest["shards"])
            rest = {key: rest[key] for key in rest if key != "shards"}
        return backend(schedule, **rest)

    def __call__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], **given: Any
    ) -> Callable[..., Sequence[Any]]:
        """The same for a graph by itself."""
        return self.from_compile(given)(gm, inputs)


def _schedule(value: object, options: dict[str, Any]) -> tuple[Schedule, Any]:
    """The schedule, and the options that are not its constructor's."""
    if isinstance(value, Schedule):
        _check_known(f"the Schedule {value.name}", options, ())
        return value, options
    if isinstance(value, PathLike) or (
        isinstance(value, str) and Path(value).is_file()
    ):
        _check_known(f"the file {value}", options, ())
        return load_schedule(value), options
    if not isinstance(value, str):
        raise PlanError(
            f'options={{"schedule": {value!r}}}: give the name of a schedule, a '
            "Schedule, or a file that Schedule.save wrote"
        )
    name = LIBRARY.name(value)
    takes = inspect.signature(LIBRARY[name]).parameters
    _check_known(name, options, tuple(takes))
    stages = options.get("stages")
    own = {key: options[key] for key in options if key in takes}
    if "stages" in own and not is_count(stages):  # names of modules, for the backend
        del own["stages"]
    needed = [k for k, p in takes.items() if p.default is p.empty and k not in own]
    if needed:
        raise PlanError(
            f'options={{"schedule": {name!r}}} needs {" and ".join(needed)} too; it '
            f"takes {', '.join(takes)}, such as options={EXAMPLE}"
        )
    schedule = LIBRARY[name](**own)
    rest = {key: options[key] for key in options if key not in own}
    if is_count(rest.get("stages")):
        rest.pop("stages")
        if schedule.stages not in (None, stages):
            raise PlanError(
                f'options={{"stages": {stages}}}: {name} makes {schedule.stages} '
                "stages of these workers; leave it out"
            )
        schedule = replace(schedule, stages=stages)
    return schedule, rest


def _check_known(name: str, options: Mapping[str, Any], takes: Sequence[str]) -> None:
    """Raises PlanError for an option that neither schedule nor backend has."""
    known = (*takes, *NAMES)
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1, 0.75)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            own = f"{', '.join(takes)}; " if takes else "nothing more; "
            raise PlanError(
                f"options={{{key!r}: ..}} is not known{hint}: {name} takes {own}"
                f"fxsched.backend takes {', '.join(dict.fromkeys(NAMES))}"
            )


NAMED = NamedBackend()
configure_dynamo()
