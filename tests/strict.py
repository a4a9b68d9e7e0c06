"""Random plans and planted faults by NCCL's rules: python -m tests.strict [--plans N]
[--faults N] [--seed S] [--queues K].

The plans are those of random_plans.py, in the program's order, and equal eager PyTorch.
A fault moves a send or a receive to another place of a program, or swaps two. The
proof finds it, or the programs run as before; without the proof, transport="strict"
stops them and names who waits. Ends with 1 for any other case.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from unittest import mock

import torch
from torch import fx, nn

import fxsched
from fxsched import CheckError, schedules
from fxsched.ir import ops
from fxsched.plans.plan import Plan
from fxsched.transport import strict
from fxsched.transport.strict import TransferError

from .random_plans import assert_equals_eager, random_family, within

FAMILY = 4  # plans of one model
SECONDS = 10  # in which a fault is named


def run_plans(families: int, seed: int) -> tuple[int, int]:
    """How many plans equal eager, and of how many."""
    equal = total = 0
    for number in range(seed, seed + families):
        torch._dynamo.reset()
        for case in random_family(number, FAMILY):
            total += 1
            try:
                with within(100):
                    assert_equals_eager(case._replace(order="static"), "strict")
                equal += 1
            except Exception as error:
                print(f"random_family({number}): {type(error).__name__}: {error}")
    return equal, total


def plant(program: fx.GraphModule, draw: random.Random) -> str | None:
    """Moves or swaps messages of a program; what it did, None if it has too few."""
    messages = [
        node
        for node in program.graph.nodes
        if node.op == "call_function" and node.target in (ops.send, ops.recv, ops.fetch)
    ]
    if len(messages) < 2:
        return None
    one, other = draw.sample(messages, 2)
    if draw.random() < 0.5 and one.target is other.target:
        one.kwargs, other.kwargs = other.kwargs, one.kwargs
        return f"{one} and {other} are swapped"
    nodes = list(program.graph.nodes)
    here, there = nodes.index(one), nodes.index(other)
    reads = [nodes.index(each) for each in one.all_input_nodes]
    readers = [nodes.index(each) for each in one.users]
    if max(reads, default=-1) >= there or min(readers, default=len(nodes)) <= there:
        return None
    (other.append if there > here else other.prepend)(one)
    return f"{one} is moved to {other}"


def _verdict(seed: int) -> str | None:
    """What becomes of a fault; None for a seed that plants none."""
    draw = random.Random(seed)
    names = ("gpipe", "1f1b", "fsdp", "interleaved", "zb_v", "fslpp")
    name = draw.choice(names)
    size = {"group_size": 2} if name == "fslpp" else {}
    schedule = schedules.LIBRARY[name](workers=4, microbatches=8, **size)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    x, worker, said = torch.randn(8, 4), draw.randrange(4), list[str]()

    def wrong(program: fx.GraphModule, request: object) -> fx.GraphModule:
        own = next(n.meta["worker"] for n in program.graph.nodes if "n" in n.meta)
        if own == worker and (what := plant(program, draw)) is not None:
            said.append(what)
            program.recompile()
        return program

    def run(*passes: object) -> list[torch.Tensor]:
        model.zero_grad()
        given = {"transport": "strict", "passes": list(passes)}
        torch._dynamo.reset()
        with fxsched.backend(schedule, **given) as backend:
            torch.compile(model, backend=backend)(x).sum().backward()
        return [each.grad.clone() for each in model.parameters()]

    try:
        run(wrong)
        verdict = "runs, and the proof passes it" if said else None
    except CheckError:
        verdict = "found by the proof"
    if verdict is None:
        return None
    said.clear()
    draw = random.Random(seed)
    draw.choice(names), draw.randrange(4)
    with mock.patch.object(Plan, "check", lambda plan: None):
        try:
            with within(SECONDS):
                found = run(wrong)
        except TransferError:
            return f"{verdict}, stopped by the transport"
        except TimeoutError:
            print(f"seed {seed}: {said}: hangs")
            return "neither"
        except Exception as error:  # a value that isn't there, or of another shape
            return f"{verdict}, stopped by {type(error).__name__}"
    same = all(map(torch.allclose, found, run()))
    if not same and not verdict.startswith("found"):
        print(f"seed {seed}: {said}: wrong, and passed")
        return "neither"
    return f"{verdict}, {'equal' if same else 'wrong'} without it"


def run_faults(count: int, seed: int) -> Counter[str]:
    """Of so many faults, how many came to which end."""
    found: Counter[str] = Counter()
    while found.total() < count:
        verdict = _verdict(seed)
        seed += 1
        if verdict is not None:
            found[verdict] += 1
    return found


def main() -> int:
    """Prints how many are equal, and what came of faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queues", type=int, default=strict.QUEUES)
    options = parser.parse_args()
    strict.QUEUES = options.queues
    equal, total = run_plans(-(-options.plans // FAMILY), options.seed)
    print(f"{equal} of {total} plans equal eager, with {options.queues} queues")
    faults = run_faults(options.faults, options.seed)
    for verdict, number in faults.most_common():
        print(f"{number:4} faults: {verdict}")
    return int(equal < total or faults["neither"] > 0)


if __name__ == "__main__":
    sys.exit(main())
