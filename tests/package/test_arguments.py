"""Arguments of the wrong kind: what is said of each, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import Direction, Job, PlanError, Schedule, schedules

GPIPE = schedules.gpipe(2, 4)
TIMES = {"F": 1.0, "B": 2.0}
HUGE = 10**9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.relu(self.encoder(x))).mean()


def two(**changes: Any) -> Schedule:
    """Two workers, two microbatches, two stages, but for `changes`."""
    given = {"workers": 2, "microbatches": 2, "stages": 2, "w": lambda s, b, d: (s, s)}
    return Schedule(**(given | changes))


def oops(*given: Any) -> Any:
    raise KeyError("oops")


def late(s: int, b: int, d: Direction) -> int:
    return [0, 1, 2][s + 2 * b]


def refuses(message: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(PlanError, match=message):
        call(*args, **options)


def cases(name: str, *rows: tuple[Any, str]) -> Any:
    return pytest.mark.parametrize((name, "message"), rows)


# ------------------------------------------------------------------- simulate, Link


@cases(
    "schedule",
    (0, r"simulate\(schedule=0\): give a Schedule, such as"),
    (None, r"simulate\(schedule=None\): give a Schedule"),
    (schedules.gpipe, r"simulate\(schedule=<function gpipe.*give a Schedule"),
)
def test_simulate_takes_a_schedule(schedule: Any, message: str) -> None:
    refuses(message, fxsched.simulate, schedule)


@cases(
    "durations",
    ("F", r"simulate\(durations='F'\): give times of F and B"),
    (3, r"simulate\(durations=3\): give times of F and B"),
    ((1.0, 2.0), r"simulate\(durations=\(1.0, 2.0\)\): give .* a timeline"),
    (np.ones(2), r"simulate\(durations=array.*give times of F and B"),
    ({1, 2}, r"simulate\(durations=\{1, 2\}\): give"),
    ([("0F0", 0, 0, 1)], r"a timeline, such as backend.timeline"),
    (oops, r"durations\(0F0\) raised KeyError: 'oops' at .*test_arguments.py:\d+"),
    (lambda a, b: 1, r"durations\(0F0\) raised TypeError: .*it is called with a Job"),
    (lambda job: None, r"durations: 0F0 takes None; give a number, 0 or more"),
    (lambda job: "1", r"durations: 0F0 takes '1'; give a number"),
)
def test_durations_of_other_kinds(durations: Any, message: str) -> None:
    refuses(message, fxsched.simulate, GPIPE, durations=durations)


@cases(
    "options",
    ({"stages": np.array([1, 2])}, r"simulate\(stages=array.*an int of 1 or more"),
    ({"stages": nx.DiGraph([("a", 1)])}, r"its nodes are \['a', 1\]; number the stag"),
    ({"stages": HUGE}, r"stages=1000000000\): give an int of 1 or more, 100,000 at"),
    ({"transfer": np.ones(2)}, r"simulate\(transfer=array.*give a time of 0 or more"),
    ({"prefetch": np.array([1, 2])}, r"simulate\(prefetch=array.*how many jobs ahead"),
)
def test_options_of_simulate(options: Any, message: str) -> None:
    refuses(message, fxsched.simulate, schedules.ddp(2), **options)


@pytest.mark.parametrize("bandwidth", ["1", None, np.ones(2), True, float("nan")])
def test_links_have_numbers(bandwidth: Any) -> None:
    refuses("give a bandwidth above 0 and a latency", fxsched.Link, bandwidth)


# ------------------------------------------------------------------------ counts


@pytest.mark.parametrize("field", ["workers", "microbatches", "stages", "in_flight"])
@pytest.mark.parametrize(
    "count", [np.array([1, 2]), np.array([2]), torch.ones(2, dtype=torch.int64), [2]]
)
def test_counts_are_not_arrays(field: str, count: Any) -> None:
    refuses(rf"Schedule\({field}=.*give ", two, **{field: count})
    refuses(r"gpipe\(workers=", schedules.gpipe, count, 2)


@cases(
    "make",
    (lambda: Schedule(HUGE, 2), r"Schedule\(workers=1000000000\): .* 100,000 at most"),
    (lambda: Schedule(2, HUGE), r"Schedule\(microbatches=1000000000\)"),
    (lambda: schedules.ddp(HUGE), r"ddp\(workers=1000000000\): .*100,000 at most"),
    (lambda: schedules.zb_v(HUGE, HUGE), r"zb_v\(workers=1000000000\): "),
    (
        lambda: fxsched.simulate(schedules.ddp(10**5)),
        "100,000 microbatches on 100,000 workers are too many to plan or simulate",
    ),
    (
        lambda: fxsched.search(TIMES, 10**5, 10),
        r"search\(workers=100000, microbatches=10\): these make 3,000,000 jobs",
    ),
    (
        lambda: torch.compile(Net(), backend=fxsched.backend(Schedule(10**4, 2)))(
            torch.ones(4, 3)
        ),
        "a process runs at most 4,096 workers as threads",
    ),
)
def test_huge_counts_end_at_once(make: Callable[[], Any], message: str) -> None:
    refuses(message, make)


# ------------------------------------------------------------- w, n, in_flight, fit


@cases(
    "changes",
    ({"w": oops}, r"w\(0F0\) raised KeyError: 'oops' at .*test_arguments.py:\d+; it"),
    ({"n": oops}, r"n\(0F0\) raised KeyError: 'oops' at .*called with \(stage, mic"),
    ({"n": late}, r"n\(1F1\) raised IndexError: list index out of range at .*py:\d+"),
    ({"w": lambda s, b: (0, 0)}, r"w\(0F0\) raised TypeError: .*positional argument"),
    ({"in_flight": oops}, r"in_flight\(0\) raised KeyError: 'oops'.*number of a stag"),
    ({"fit": oops}, r"fit\(stages\) raised KeyError: 'oops' at .* networkx.DiGraph"),
    ({"n": lambda s, b, d: d == "X"}, "a direction is compared with 'X'; compare it"),
)
def test_what_w_n_and_fit_raise_names_the_job(
    changes: dict[str, Any], message: str
) -> None:
    refuses(message, fxsched.simulate, two(**changes))


def test_errors_of_n_in_plans_and_replicas() -> None:
    message = r"n\(0F0\) raised KeyError: 'oops'"
    refuses(message, fxsched.plan, Net(), two(n=oops), torch.ones(4, 3))
    refuses(message, fxsched.simulate, schedules.replicate(two(n=oops), 2))


def test_directions_are_equal_to_their_letters() -> None:
    letters = {"F": 0, "B": 10}

    def timeline(n: Callable[[int, int, Direction], int]) -> list[Any]:
        return list(fxsched.simulate(two(n=n)).timeline)

    wanted = timeline(lambda s, b, d: b + 10 * (d is Direction.BACKWARD))
    assert timeline(lambda s, b, d: b + 10 * (d == "B")) == wanted
    assert timeline(lambda s, b, d: b + 10 * (d in ("B", "W"))) == wanted
    assert timeline(lambda s, b, d: b + letters[d]) == wanted  # type: ignore[index]
    assert {d: str(d) for d in Direction} == {d: d for d in "FBWU"}
    assert Direction.FORWARD != Direction.BACKWARD and Direction.FORWARD != 0
    assert hash(Job.parse("2F0")) == hash(Job(2, 0, Direction.FORWARD))


# ------------------------------------------------------------------- the backend


@cases(
    "options",
    ({"memory_limit": [1e9]}, r"backend\(memory_limit=\[.*give bytes, above 0"),
    ({"memory_limit": "8GB"}, r"backend\(memory_limit='8GB'\): give bytes"),
    ({"memory_limit": np.ones(2)}, r"backend\(memory_limit=array"),
    ({"profile": ""}, r"backend\(profile=''\): give True, or what fxsched.profile"),
    ({"profile": 0}, r"backend\(profile=0\): give True, or"),
    ({"profile": {"a": 1}}, r"backend\(profile=\{'a': 1\}\): give True"),
    ({"order": np.ones(2)}, r"backend\(order=array.*give 'static' or 'dynamic'"),
    ({"order": "dinamic"}, r"'dynamic'; did you mean 'dynamic'\?"),
    ({"transport": "thread"}, r"did you mean 'threads'\?"),
    ({"stage_compiler": "inducter"}, r"did you mean 'inductor'\?"),
    ({"passes": None}, r"backend\(passes=None\): give a list of functions"),
    ({"passes": oops}, r"backend\(passes=<function oops.*give a list of functions"),
    ({"same_stage": None}, r"backend\(same_stage=None\): give groups of names"),
    ({"same_stage": 3}, r"backend\(same_stage=3\): give groups"),
    ({"same_stage": [[1, 2]]}, r"backend\(same_stage=\[\[1, 2\]\]\): give groups"),
    ({"prefetch": np.array([1, 2])}, r"backend\(prefetch=array.*give an int"),
)
def test_options_of_backend(options: Any, message: str) -> None:
    refuses(message, fxsched.backend, GPIPE, **options)


@cases(
    "options",
    ({"stages": ["decodr"]}, r"stages names module 'decodr'.*did you mean decoder"),
    ({"same_stage": [["encodr", "decoder"]]}, r"'encodr'.*did you mean encoder"),
)
def test_names_of_modules(options: Any, message: str) -> None:
    refuses(message, fxsched.plan, Net(), GPIPE, torch.ones(4, 3), **options)


@cases(
    "model",
    (0, r"plan\(model=0\): give an nn.Module or a function of tensors"),
    (None, r"plan\(model=None\): give an nn.Module"),
    (Net, r"plan\(model=Net\): give a model, Net\(...\), not its class"),
    (GPIPE, r"plan\(model, ...\): the model comes first, here is a Schedule"),
)
def test_plan_takes_a_model(model: Any, message: str) -> None:
    refuses(message, fxsched.plan, model, GPIPE, torch.ones(4, 3))
    refuses(message.replace("plan", "profile"), fxsched.profile, model, torch.ones(4))


def test_a_refused_class_is_not_compiled() -> None:
    before = Net.__call__
    refuses("not its class", fxsched.plan, Net, GPIPE, torch.ones(4, 3))
    assert Net.__call__ is before


def test_profile_takes_counts() -> None:
    for repeats in ("3", [3], 0):
        refuses(r"profile\(repeats=", fxsched.profile, Net(), 1, repeats=repeats)


def test_a_schedule_is_no_backend() -> None:
    step = torch.compile(Net(), backend=GPIPE)
    refuses(r"backend=fxsched.backend\(schedule\)", step, torch.ones(4, 3))
    step = torch.compile(Net(), backend=fxsched.backend)
    with pytest.raises(Exception, match=r"backend=fxsched.backend\(schedule\)"):
        step(torch.ones(4, 3))


# --------------------------------------------------------------------- search, files


@cases(
    "options",
    ({"transfer": "1"}, r"search\(transfer='1'\): give a time of 0 or more, a Link"),
    ({"transfer": [1]}, r"search\(transfer=\[1\]\): give a time"),
    ({"transfer": float("inf")}, r"search\(transfer=inf\): give a time"),
    ({"transfer": np.ones(2)}, r"search\(transfer=array"),
    ({"kept": "1"}, r"search\(kept='1'\): give a share, from 0 to 1"),
    ({"kept": [1]}, r"search\(kept=\[1\]\): give a share"),
    ({"kept": None}, r"search\(kept=None\): give a share"),
    ({"stages": 2.5}, r"search\(stages=2.5\): give an int of 1 or more"),
    ({"stages": "4"}, r"search\(stages='4'\): give an int"),
    ({"stages": [2.5]}, r"search\(stages=2.5\): give an int"),
    ({"memory_limit": [4]}, r"search\(memory_limit=\[4\]\): give a number above 0"),
    ({"effort": "x"}, r"search\(effort='x'\): give a number above 0"),
    ({"prefetch": "1", "transfer": 1}, r"search\(prefetch='1', transfer=1\): give how"),
    ({"seed": [1]}, r"search\(seed=\[1\]\): give an int"),
    ({"objective": "latencies"}, r"'span'; did you mean 'latency'\?"),
    ({"split_backward": "no"}, r"search\(split_backward='no'\): give True or False"),
    ({"args": torch.ones(2)}, r"search\(args=\): give a tuple .*not Tensor; one is"),
    ({"kwargs": [3]}, r"search\(kwargs=\[3\]\): give a dict"),
    ({"workers": HUGE}, r"search\(workers=1000000000\): .*100,000 at most"),
)
def test_options_of_search(options: Any, message: str) -> None:
    given = {"workers": 2, "microbatches": 2, "quiet": True} | options
    refuses(message, fxsched.search, TIMES, **given)


def test_search_counts_stages_by_numpy_too() -> None:
    options = {"quiet": True, "effort": 1e-3}
    for stages in (np.int64(2), np.array([2]), (2,)):
        fxsched.search(TIMES, 2, 2, stages=stages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("timelines", [3, {"a": 3}, [1]])
def test_write_trace_takes_timelines(timelines: Any) -> None:
    refuses("give timelines by name", fxsched.write_trace, "/none/a.json", timelines)
