"""fxsched's contestants of `peers` and `memory`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

import fxsched
from fxsched import Schedule, schedules
from fxsched.options import Options

from .language import Setup
from .measure import Contestant, clear


class Unrecorded(Options):
    """Options of a backend that has a profile and records nothing."""

    record = False  # type: ignore[assignment]


def recording(options: Options, record: bool) -> Options:
    """The same options, for a backend that records when jobs run, or does not."""
    given = {each.name: getattr(options, each.name) for each in fields(Options)}
    if not record:
        return Unrecorded(**given)
    return Options(**{**given, "profile": options.profile or True})


FITTED = 4  # steps that a profile is fitted to
TENSOR_PARALLEL = (
    "torch-tp",
    "torch-tp-whole",
    "torch-tp-head",
    "torch-tp-head-whole",
)
FSDPS = ("torch-fsdp", "torch-fsdp-kept", "torch-fsdp-late", "torch-fsdp-gathered")


class Entry(NamedTuple):
    """A contestant of fxsched.

    split: where its stages come from: its "rival"'s, a stage for each of the "blocks",
        fxsched's "estimate", or a "profile" that was fitted to steps of its stages.
    rivals: by name; the fastest of them counts.
    order: as for fxsched.backend.
    """

    name: str
    schedule: Callable[[int, int], Schedule]
    split: str
    rivals: tuple[str, ...] = ()
    order: str = "static"


def looped(
    schedule: Callable[..., Schedule], per_rank: int
) -> Callable[[int, int], Schedule]:
    return lambda workers, count: schedule(workers, count, per_rank * workers)


def fsdp_by_stages(workers: int, count: int) -> Schedule:
    """A worker runs each stage for all of its microbatches before the next stage."""
    return replace(schedules.fsdp(workers, count), n=schedules.stage_first)


def ahead(workers: int, count: int) -> Schedule:
    """1F1B with room for delays."""
    return schedules.one_f_one_b(workers, count, ahead=2)


def zb_v_free(workers: int, count: int) -> Schedule:
    """zb_v without a cap: as many activations as gpipe, and no wait for one to end."""
    return replace(schedules.zb_v(workers, count), in_flight=None)


def in_shards(workers: int, count: int) -> Schedule:
    """A shard of every layer on each worker, and two microbatches on their way, so that
    one is computed while the other is added up."""
    return schedules.sharded(replace(schedules.gpipe(1, count), in_flight=2), workers)


def in_shards_whole(workers: int, count: int) -> Schedule:
    """The same of the whole batch at once."""
    return schedules.sharded(schedules.gpipe(1, 1), workers)


def _entries() -> tuple[Entry, ...]:
    library = schedules.LIBRARY
    found = []
    for name in ("gpipe", "1f1b", "interleaved"):
        rivals = (f"torch-{name}",)
        found.append(Entry(name, library[name], "rival", rivals))
        found.append(Entry(f"{name}-auto", library[name], "estimate", rivals))
        found.append(Entry(f"{name}-profile", library[name], "profile", rivals))
    rivals = ("torch-1f1b",)
    found.append(Entry("1f1b-ahead", ahead, "rival", rivals))
    found.append(Entry("1f1b-ahead-profile", ahead, "profile", rivals))
    found.append(Entry("ddp", schedules.ddp, "estimate", ("torch-ddp",)))
    found.append(Entry("ddp-blocks", schedules.ddp, "blocks", ("torch-ddp",)))
    found.append(Entry("fsdp", schedules.fsdp, "blocks", FSDPS))
    found.append(Entry("fsdp-stages", fsdp_by_stages, "blocks", FSDPS))
    found.append(Entry("shards", in_shards, "estimate", TENSOR_PARALLEL))
    found.append(Entry("shards-whole", in_shards_whole, "estimate", TENSOR_PARALLEL))
    for name in ("zb_h1", "zb_h2", "zb_v", "v_half", "folded", "cuckoo", "looped_bfs"):
        found.append(Entry(name, library[name], "profile"))
    found.append(Entry("zb_v-dynamic", zb_v_free, "profile", order="dynamic"))
    for v in (3, 4):
        make = looped(schedules.interleaved, v)
        found.append(Entry(f"interleaved-{v}", make, "profile"))
    return tuple(found)


ENTRIES = _entries()


def enter(
    entry: Entry,
    setup: Setup,
    stages: str | Sequence[str],
    profile: fxsched.Profile | None = None,
    record: bool = False,
) -> tuple[Contestant, fxsched.Backend]:
    """The contestant, after a step, and its backend."""
    model = setup.model()
    schedule = entry.schedule(dist.get_world_size(), setup.microbatches)
    compiler = "inductor" if setup.compiled else "eager"
    made = fxsched.backend(
        schedule,
        stages,
        stage_compiler=compiler,
        order=entry.order,
        profile=profile,
    )
    backend = fxsched.Backend(recording(made.options, record))
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        compiled(*setup.inputs).backward()

    return Contestant(entry.name, model, step), backend


def fit(entry: Entry, setup: Setup, profile: fxsched.Profile) -> fxsched.Profile:
    """The profile, once its stages ran for some steps."""
    contestant, backend = enter(entry, setup, "auto", profile, record=True)
    timelines = []
    for _ in range(FITTED + 1):  # the first one warms up
        clear(contestant.model)
        contestant.step()
        timelines.append(backend.timeline)
    clear(contestant.model)
    assert backend.plan is not None
    return backend.plan.profile(*timelines[1:])
