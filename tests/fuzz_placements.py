"""Random models by random schedules: python -m tests.fuzz_placements [--cases N]
[--seed S] [--lines L] [--shrink].

A model has 40 or more operations: state, draws, backwards and hooks of its own, writes
and reductions over the batch; see tests/random_models.py. Three steps of SGD with
momentum leave losses, parameters and buffers as in eager PyTorch on the whole batch;
one that draws is compared by fxsched.verify. A case is equal, refused by a PlanError,
wrong or crashed, which prints its source; --shrink takes lines out of it as long as the
same happens. Unstable is one whose results in eager PyTorch change too when weights
differ by a part in 1e12, as with an argsort of what rounding decides. Ends with 1 if
any is wrong or crashed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.testing import assert_close

import fxsched
from fxsched import PlanError, Schedule, schedules

from .cases import anything
from .random_models import Drawn, Program, batch, random_program
from .random_plans import within

LIMIT, STEPS = 120, 3
KINDS = ("equal", "refused", "unstable", "wrong", "crashed")
NOISE = 1e-12
SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": lambda count, seed: schedules.one_f_one_b(2, count),
    "ddp": lambda count, seed: schedules.ddp(2, count),
    "fsdp": lambda count, seed: schedules.fsdp(2, count),
    "interleaved": lambda count, seed: schedules.interleaved(2, count),
    "gpipe": lambda count, seed: schedules.gpipe(3, count),
    "zb_h1": lambda count, seed: schedules.zb_h1(2, count),
    "graph": lambda count, seed: schedules.graph(2, count),
    "random": lambda count, seed: anything(seed, 2),
}


class Case(NamedTuple):
    """A model, how it is planned, and the seed of both."""

    seed: int
    program: Program
    schedule: str
    microbatches: int
    options: dict[str, Any]

    def __str__(self) -> str:
        how = f"{self.schedule}, {self.microbatches} microbatches, {self.options}"
        return f"# {how}\n{self.program}"


def case_of(seed: int, lines: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    options = {
        "order": draw.choice(("static", "static", "dynamic")),
        "carry": draw.choice(("saved", "saved", "recompute")),
        "pairs": draw.choice(("auto", "spread")),
    }
    name, count = draw.choice(list(SCHEDULES)), draw.choice((2, 4))
    return Case(seed, random_program(seed, lines), name, count, options)


def outcome(case: Case) -> tuple[str, str]:
    """One of KINDS, and why."""
    torch._dynamo.reset()
    try:
        with within(LIMIT), quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            why = drawn(case) if case.program.draws else trained(case)
    except PlanError as error:
        return "refused", " ".join(str(error).split())
    except Exception as error:
        trace = traceback.format_exc() if "-v" in sys.argv else ""
        first = (str(error).splitlines() or [""])[0]
        return "crashed", f"{type(error).__name__}: {first} {trace}"
    if not why:
        return "equal", ""
    stable = case.program.draws or not changed_by_noise(case)
    return ("wrong" if stable else "unstable"), why


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """float64 by default, and nothing printed."""
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def schedule_of(case: Case) -> Schedule:
    return SCHEDULES[case.schedule](case.microbatches, case.seed)


def drawn(case: Case) -> str:
    """What of a step is not eager's, with the plan's random numbers."""
    model = Drawn(case.program, case.seed)
    found = fxsched.verify(model, schedule_of(case), *batch(0), **case.options)
    bad = [each.name for each in found.differences if not each.passed]
    return f"{', '.join(bad)}: {' '.join(found.why.split())}" if bad else ""


def trained(case: Case) -> str:
    """What of some steps is not eager's."""
    model = Drawn(case.program, case.seed)
    eager = copy.deepcopy(model)
    with fxsched.backend(schedule_of(case), **case.options) as backend:
        found = steps(model, torch.compile(model, backend=backend))
    return differences(found, steps(eager, eager))


def changed_by_noise(case: Case) -> bool:
    """Whether eager's own results differ when weights change in their last digits."""
    with quiet():
        model = Drawn(case.program, case.seed)
        other = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(case.seed)
        with torch.no_grad():
            for weight in other.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.mul_(1 + NOISE * noise)
        return bool(differences(steps(other, other), steps(model, model)))


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What is not equal, and how."""
    bad = []
    for name, want in wanted.items():
        try:
            assert_close(found[name], want, rtol=1e-7, atol=1e-9, equal_nan=True)
        except AssertionError as error:
            bad.append(f"{name}: {' '.join(str(error).split())[:80]}")
    return "; ".join(bad)


def steps(model: nn.Module, call: Callable[..., Any]) -> dict[str, Any]:
    """Losses, first gradients, and what is left of parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    values: dict[str, Any] = {}
    for step in range(STEPS):
        loss = call(*batch(step))
        loss.backward()
        values[f"loss {step}"] = loss.detach()
        if not step:
            for name, parameter in model.named_parameters():
                values[f"gradient of {name}"] = copy.deepcopy(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return values | fxsched.full_state_dict(model)


def shrunk(case: Case, kind: str) -> Case:
    """With as few lines as the same comes of: ever smaller blocks go."""
    width = len(case.program.lines)
    while width > 1:
        width = (width + 1) // 2
        for start in reversed(range(0, len(case.program.lines), width)):
            program = case.program
            for line in reversed(program.lines[start : start + width]):
                program = program.without(line.number)
            less = case._replace(program=program)
            if runs(less) and outcome(less)[0] == kind:
                case = less
    return case


def runs(case: Case) -> bool:
    """Whether eager PyTorch does."""
    try:
        with quiet():
            Drawn(case.program, case.seed)(*batch(0)).backward()
    except RuntimeError:
        return False
    return True


def main() -> int:
    """Runs the cases; 1 if any is wrong or crashes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz_placements", description=__doc__
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--lines", type=int, default=40, help="of a model")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("-v", action="store_true", help="with tracebacks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fxsched").setLevel(logging.ERROR)
    start, kinds = time.perf_counter(), Counter[str]()
    for seed in range(options.seed, options.seed + options.cases):
        case = case_of(seed, options.lines)
        kind, why = outcome(case)
        kinds[kind] += 1
        if kind != "equal":
            print(f"{kind}: {seed}: {why}", flush=True)
        if kind in ("wrong", "crashed") or (kind == "refused" and options.shrink):
            print(shrunk(case, kind) if options.shrink else case, flush=True)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
    seconds = time.perf_counter() - start
    print(f"{options.cases} cases: {counts}; {seconds:.0f} s")
    return int(kinds["wrong"] + kinds["crashed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
