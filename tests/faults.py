"""What is planted in a random plan: a fault, its victim, and the plan that has it."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from fxsched import Job, passes
from fxsched.ir import ops
from tests.random_plans import Case, random_case

TIMEOUT = 3.0  # seconds, of the backends
SHORT, LONG = 0.5 * TIMEOUT, TIMEOUT + 2  # seconds of a rank that is slow, or too slow
ROUNDS = (  # each on ranks of its own: what they survive, then what one does not
    ("F", "B", "W", "kill"),
    ("transfer", "optimizer", "pass", "stop"),
    ("slow", "late", "disk", "cut"),
)


class Planted(Exception):
    """What a fault raises."""


class Trial(NamedTuple):
    """A random plan and its fault."""

    seed: int
    fault: str
    ranks: int
    victim: int
    transport: str

    @staticmethod
    def drawn(seed: int) -> Trial:
        """That of a seed: each fault on 2, 3 and 4 ranks, over both transports."""
        kinds = [fault for group in ROUNDS for fault in group]
        turn, kind = divmod(seed, len(kinds))
        draw = random.Random(seed)
        ranks = 2 + turn % 3
        gloo = kinds[kind] in ROUNDS[-1] or turn % 2
        transport = "gloo" if gloo else "distributed"
        return Trial(seed, kinds[kind], ranks, draw.randrange(ranks), transport)

    def case(self) -> Case:
        """Its plan, with what the fault needs: jobs W, a loss, a step on each rank."""
        case = random_case(self.seed, self.ranks)
        case.model.nodes[0].linear.weight.requires_grad_(True)
        if self.fault == "optimizer":
            case.model.returns = "loss"
            case = case._replace(x_trains=False)
        split = self.fault == "W" or case.schedule.split_backward
        schedule = replace(case.schedule, split_backward=split)
        return case._replace(schedule=schedule)


class Fuse:
    """A pass that puts a fault into a random task of the victim's program."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.armed, self.task = trial, False, ""

    def __call__(self, program: fx.GraphModule, request: Any) -> fx.GraphModule:
        if dist.get_rank() != self.trial.victim:
            return program
        if self.trial.fault == "pass" and self.armed:
            raise Planted("planted")
        jobs = {n.meta["task"]: n.meta["job"] for n in _tasks(program, "job")}
        places = [
            (node, read)
            for node in _tasks(program, "task")
            if self._takes(node, jobs.get(node.meta["task"]))
            for read in node.all_input_nodes
            if read.op == "call_function" and read.meta.get("bundle") is False
        ]
        if places:
            node, read = random.Random(self.trial.seed).choice(places)
            with program.graph.inserting_before(node):
                new = program.graph.call_function(self.burn, (read,))
            passes.replaces(new, read)
            node.replace_input_with(read, new)
            self.task = node.meta["task"]
        return program

    def _takes(self, node: fx.Node, job: Job | None) -> bool:
        fault = self.trial.fault
        if fault == "transfer":
            return node.target is ops.send
        if job is None or node.target is ops.free:
            return False
        return fault in ("slow", "late") or job.direction.value == fault

    def burn(self, value: Any) -> Any:
        """The value, unless this is where the fault is."""
        if self.armed and self.trial.fault in ("slow", "late"):
            self.armed = False
            time.sleep(SHORT if self.trial.fault == "slow" else LONG)
        elif self.armed:
            raise Planted("planted")
        return value


def _tasks(program: fx.GraphModule, key: str) -> list[fx.Node]:
    """Its nodes that have this key."""
    return [node for node in program.graph.nodes if key in node.meta]


class FailingSGD(torch.optim.SGD):
    """Raises in its step while it is armed; on the victim alone."""

    armed = False

    def step(self, closure: Any = None) -> Any:
        if FailingSGD.armed:
            raise Planted("planted")
        return super().step(closure)
