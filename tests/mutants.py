"""Wrong programs that the proof must find: python -m tests.mutants [--programs N]
[--passes N] [--seed S] [--plan NAME].

A mutant of a program is one that a pass of one worker's could have made: another value
of its shape, two arguments swapped, a node dropped or doubled, sends swapped, a free
moved, another version, another order of a sum, an operation inside of a stage changed.
A mutant of the passes is a step in which a line of all workers alike is wrong. Each is
found, or runs and is equal to eager PyTorch; ends with 1 if one is neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsched
import fxsched.planning
from fxsched import CheckError, Plan, Schedule, ops, pipeline, schedules
from fxsched.checker.memory import OVERWRITES
from fxsched.ir.step import JobOutput, Op, Step, values_in, with_values
from fxsched.passes.step.frees import free_values
from fxsched.progress import Progress

ROWS, WIDTH = 8, 4
VERDICTS = ("found", "equal", "wrong")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x, y)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.table(x.abs().long().clamp(max=5)[:, 0])
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x @ self.table.weight[:WIDTH].T, y)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.a(x) * self.b(y)).square().mean()


class Pairs(Towers):
    """Rows of the whole batch meet."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.a(x)).tanh() @ self.b(y).tanh().T
        return logits.logsumexp(1).mean() - logits.diagonal().mean()


class Normed(Chain):
    """With running statistics, in each microbatch, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.layers[0](x)), 0.25)
        return super().forward(x, y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "tied": Tied,
    "towers": Towers,
    "pairs": Pairs,
    "normed": Normed,
}


def waits(s: int, b: int) -> int | str | None:
    """Where activations of each microbatch wait: of two on disk, of one on the other
    worker."""
    return ("disk", 1 - s, "disk", None)[b]


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "gpipe": lambda: schedules.gpipe(2, 4),
    "1f1b": lambda: schedules.one_f_one_b(2, 4),
    "interleaved": lambda: schedules.interleaved(2, 4),
    "zb_h1": lambda: schedules.zb_h1(2, 4),
    "ddp": lambda: schedules.ddp(2, 4),
    "fsdp": lambda: schedules.fsdp(2, 4),
    "hsdp": lambda: schedules.hsdp(4, 2, 4),
    "fslpp": lambda: schedules.fslpp(4, 2, 4),
    "lpp": lambda: schedules.lpp(2, 2, 4),
    "zero2": lambda: schedules.zero2(2, 4),
    "graph": lambda: schedules.graph(2, 4),
    "parked": lambda: schedules.parked(schedules.gpipe(2, 4), waits),
    "parameter_server": lambda: schedules.parameter_server(3, 4),
    "pipedream": lambda: schedules.pipedream(2, 4),
    "pipedream_2bw": lambda: schedules.pipedream_2bw(2, 4),
}
STEPPED = ("pipedream", "pipedream_2bw")  # only with the optimizer in the program
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "deterministic": {"deterministic": True},
    "recompute": {"carry": "recompute"},
    "microbatch": {"batch_norm": "microbatch", "buffers": {}},
    "updates": {"optimizer": 0.1},
    "clipped": {"optimizer": 0.1, "clip_grad_norm": 0.5},
    "shards": {"shards": "auto"},
    "collective": {"transport": "strict"},
}


class Case(NamedTuple):
    """A model, a schedule, and options of the backend, by their names."""

    model: str
    schedule: str
    options: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


def cases() -> list[Case]:
    """What mutants are made of."""
    plain = ("gpipe", "1f1b", "interleaved", "zb_h1", "ddp", "fsdp", "fslpp", "lpp")
    others = ("zero2", "graph", "parameter_server", "parked")
    return [
        *(Case("chain", each) for each in (*plain, *others)),
        *(Case("tied", each) for each in (*plain, *others)),
        *(Case("towers", each) for each in ("1f1b", "ddp", "fslpp", "graph")),
        *(Case("pairs", each) for each in ("gpipe", "1f1b", "ddp", "fsdp", "lpp")),
        *(Case("normed", each, "microbatch") for each in ("gpipe", "zb_h1")),
        *(Case("chain", each, "updates") for each in ("1f1b", "ddp", "fsdp", "zero2")),
        *(Case("chain", each, "updates") for each in STEPPED),
        *(Case("tied", each, "clipped") for each in ("1f1b", "ddp", "lpp")),
        *(Case("chain", each, "deterministic") for each in ("ddp", "fslpp", "1f1b")),
        *(Case("tied", each, "deterministic") for each in ("ddp", "interleaved")),
        *(Case("chain", each, "recompute") for each in ("1f1b", "fsdp")),
        *(Case("chain", each, "shards") for each in ("1f1b", "gpipe")),
        *(Case("chain", each, "collective") for each in ("ddp", "hsdp")),
    ]


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def made(case: Case) -> tuple[nn.Module, Schedule, dict[str, Any]]:
    """The model of a case, its schedule and the backend's options."""
    torch.manual_seed(0)
    model, options = MODELS[case.model](), dict(OPTIONS[case.options])
    schedule = SCHEDULES[case.schedule]()
    if "shards" in options:
        schedule = dataclasses.replace(
            schedule, shards=2, w=lambda s, b, d, p: (p, p), n=lambda s, b, d, p: b
        )
        schedule = Schedule(2, 4, 2, w=lambda s, b, d, p: (p, p), shards=2)
    if "optimizer" in options:
        parameters, rate = model.parameters(), options["optimizer"]
        options["optimizer"] = torch.optim.SGD(parameters, rate, momentum=0.9)
    return model, schedule, options


@functools.cache
def planned(case: Case) -> tuple[Plan, Any, Any]:
    """The plan of a case, with the graph of stages and the request that it is of."""
    model, schedule, options = made(case)
    seen: list[Any] = []
    make = fxsched.planning.make_plan
    ordered = options.pop("transport", None) == "strict"

    def spy(cut: Any, request: Any, *rest: Any) -> Plan:
        request = dataclasses.replace(request, ordered=ordered)
        seen.append((cut, request))
        return make(cut, request, *rest)

    fxsched.planning.make_plan = spy
    try:
        plan = fxsched.plan(model, schedule, *inputs(), **options)
    finally:
        fxsched.planning.make_plan = make
    plan.check()
    return plan, *seen[-1]


# Mutants of programs

Edit = Callable[[fx.GraphModule, random.Random], str | None]


def same_kind(one: fx.Node, other: fx.Node) -> bool:
    """Whether two values have the same shapes."""
    a, b = one.meta.get("specs"), other.meta.get("specs")
    if not a or not b or len(a) != len(b):
        return False
    return all(
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b, strict=True)
    )


def reads(program: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Nodes, and each value that they read."""
    nodes = program.graph.nodes
    return [(node, value) for node in nodes for value in node.all_input_nodes]


def another_value(program: fx.GraphModule, draw: random.Random) -> str | None:
    nodes = list(program.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    node, value = draw.choice(reads(program))
    others = [
        each
        for each in nodes[: at[node]]
        if each is not value and same_kind(each, value)
    ]
    if not others:
        return None
    other = draw.choice(others)
    node.replace_input_with(value, other)
    return f"{node} reads {other} for {value}"


def swapped_arguments(program: fx.GraphModule, draw: random.Random) -> str | None:
    node = draw.choice(list(program.graph.nodes))
    values = node.all_input_nodes
    pairs = [
        (a, b) for i, a in enumerate(values) for b in values[i + 1 :] if same_kind(a, b)
    ]
    if not pairs:
        return None
    one, other = draw.choice(pairs)
    swap = {one: other, other: one}
    node.args = fx.map_arg(node.args, lambda n: swap.get(n, n))
    return f"{node} reads {one} and {other} swapped"


def dropped(program: fx.GraphModule, draw: random.Random) -> str | None:
    nodes = list(program.graph.nodes)
    node = draw.choice([each for each in nodes if each.op.startswith("call")])
    if node.users:
        at = nodes.index(node)
        others = [each for each in nodes[:at] if same_kind(each, node)]
        if not others:
            return None
        node.replace_all_uses_with(draw.choice(others))
    program.graph.erase_node(node)
    return f"{node} is left out"


def doubled(program: fx.GraphModule, draw: random.Random) -> str | None:
    nodes = [n for n in program.graph.nodes if n.op.startswith("call")]
    node = draw.choice(nodes)
    with program.graph.inserting_after(node):
        again = program.graph.node_copy(node)
    if node.target in (ops.accumulate, ops.update, ops.reduce, ops.renew):
        node.replace_all_uses_with(again)
        again.update_arg(OVERWRITES.get(node.target, 1), node)
    return f"{node} is there twice"


def swapped_sends(program: fx.GraphModule, draw: random.Random) -> str | None:
    sends = program.graph.find_nodes(op="call_function", target=ops.send)
    pairs = [
        (a, b)
        for i, a in enumerate(sends)
        for b in sends[i + 1 :]
        if same_kind(a.args[0], b.args[0]) and a.args[0] is not b.args[0]
    ]
    if not pairs:
        return None
    one, other = draw.choice(pairs)
    one.args, other.args = other.args, one.args
    nodes = list(program.graph.nodes)
    if nodes.index(one.args[0]) > nodes.index(one):
        one.args[0].append(one)
    return f"{one} and {other} are swapped"


def another_meeting(program: fx.GraphModule, draw: random.Random) -> str | None:
    """Of workers that add up a sum: it meets another, has another place among them, or
    comes before or after another."""
    sums = program.graph.find_nodes(op="call_function", target=ops.all_reduce)
    if len(sums) < 2:
        return None
    one, other = draw.sample(list(sums), 2)
    how = draw.choice(("meets another", "has another place", "is moved"))
    if how == "meets another":
        first, second = one.args, other.args
        one.args, other.args = (first[0], *second[1:]), (second[0], *first[1:])
    elif how == "has another place":
        own, place, others = one.args
        one.args = own, (place + 1) % (len(others) + 1), others
    else:
        (other.append if one < other else other.prepend)(one)
    return f"{one} {how}"


def another_version(program: fx.GraphModule, draw: random.Random) -> str | None:
    nodes = list(program.graph.nodes)
    weights = [n for n in nodes if "group" in n.meta and n.meta.get("bundle")]
    found = [(n, v) for n in nodes for v in n.all_input_nodes if v in weights]
    if not found:
        return None
    node, value = draw.choice(found)
    others = [
        each
        for each in weights
        if each is not value
        and each.meta["group"] == value.meta["group"]
        and nodes.index(each) < nodes.index(node)
        and same_kind(each, value)
    ]
    if not others:
        return None
    other = draw.choice(others)
    node.replace_input_with(value, other)
    return f"{node} reads {other} for {value}"


def another_order(program: fx.GraphModule, draw: random.Random) -> str | None:
    """Of the additions of a sum: another tree, or another first."""
    sums = [
        n
        for n in program.graph.nodes
        if n.target in (ops.accumulate, ops.reduce, ops.add) and len(n.args) > 1
    ]
    if not sums:
        return None
    node = draw.choice(sums)
    values = [each for each in node.args if isinstance(each, fx.Node)]
    if len(values) < 2:
        return None
    one, other = draw.sample(range(len(values)), 2)
    values[one], values[other] = values[other], values[one]
    place: tuple[Any, ...] = node.args[:1] if node.target is ops.reduce else ()
    node.args = (*place, *values)
    return f"{node} adds up in another order"


def inside_a_stage(program: fx.GraphModule, draw: random.Random) -> str | None:
    """An operation of a stage, on this worker alone, which no pass says."""
    calls = [n for n in program.graph.nodes if n.op == "call_module"]
    name = str(draw.choice(calls).target)
    stage = _copied(program.get_submodule(name))
    setattr(program, name, stage)
    inner = str(stage.graph.find_nodes(op="call_module")[0].target)
    flat = _copied(stage.get_submodule(inner))
    setattr(stage, inner, flat)
    nodes = [n for n in flat.graph.nodes if n.op == "call_function"]
    numbers = [n for n in nodes if any(type(a) is float for a in n.args)]
    if numbers and draw.random() < 0.5:
        node = draw.choice(numbers)
        node.args = tuple(a * 2 if type(a) is float else a for a in node.args)
        return f"{node} of {name} has another number"
    pairs = [n for n in nodes if len(n.all_input_nodes) == 2]
    if pairs and draw.random() < 0.5:
        node = draw.choice(pairs)
        one, other = node.all_input_nodes
        swap = {one: other, other: one}
        node.args = fx.map_arg(node.args, lambda n: swap.get(n, n))
        return f"{node} of {name} reads its arguments swapped"
    output = flat.graph.output_node()
    values = [v for v in output.all_input_nodes if v.op == "call_function"]
    if not values:
        return None
    value = draw.choice(values)
    with flat.graph.inserting_before(output):
        new = flat.graph.call_function(torch.ops.aten.mul.Tensor, (value, 2))
    output.replace_input_with(value, new)
    return f"{name} gives twice {value}"


def _copied(module: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = fx.GraphModule(module, graph)
    copied.meta.update(module.meta)
    return copied


EDITS: tuple[Edit, ...] = (
    another_value,
    another_value,
    another_value,
    swapped_arguments,
    dropped,
    doubled,
    swapped_sends,
    another_meeting,
    another_version,
    another_order,
    inside_a_stage,
)


def moved_free(program: fx.GraphModule, draw: random.Random) -> str | None:
    """After frees are there: one is too early, too late for nothing, or gone."""
    frees = program.graph.find_nodes(op="call_function", target=ops.free)
    free = draw.choice(frees)
    value = draw.choice(free.all_input_nodes)
    left = tuple(each for each in free.args if each is not value)
    what = draw.choice(("gone", "early", "twice"))
    if what == "gone":
        free.args = left
        return f"{value} is never freed"
    others = [u for u in value.users if u is not free]
    if what == "early" and others:
        free.args = left
        with program.graph.inserting_before(draw.choice(others)):
            early = program.graph.call_function(ops.free, (value,))
    else:
        with program.graph.inserting_after(free):
            early = program.graph.call_function(ops.free, (value,))
    early.meta.update({k: free.meta[k] for k in ("worker", "task", "n")}, specs=())
    return f"{value} is freed {what}"


class Mutant(NamedTuple):
    """A wrong program: which worker's, what is wrong, and the programs of all."""

    what: str
    worker: int
    seed: int
    programs: tuple[fx.GraphModule, ...]


def mutated(program: fx.GraphModule, seed: int) -> str | None:
    """Changes a program without frees, and gives it some; says how."""
    draw = random.Random(seed)
    edit = draw.choice((*EDITS, moved_free))
    early = edit is moved_free
    if early:
        free_values(program.graph)
    try:
        what = edit(program, draw)
        program.graph.lint()
    except (RuntimeError, IndexError):
        return None
    if what is not None and not early:
        for node in program.graph.nodes:
            node.meta.setdefault("worker", 0)
        free_values(program.graph)
    return what


def without_frees(program: fx.GraphModule) -> fx.GraphModule:
    """A program of its own, as passes of the user's see it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for free in graph.find_nodes(op="call_function", target=ops.free):
        graph.erase_node(free)
    return fx.GraphModule(program, graph)


def mutants(case: Case, seeds: Iterator[int]) -> Iterator[Mutant]:
    plan, *_ = planned(case)
    for seed in seeds:
        worker = random.Random(~seed).randrange(len(plan.programs))
        program = without_frees(plan.programs[worker])
        what = mutated(program, seed)
        if what is not None:
            others = list(plan.programs)
            others[worker] = program
            yield Mutant(what, worker, seed, tuple(others))


def outcome(case: Case, *passes: Any) -> dict[str, Tensor]:
    """Losses of two steps, and what they leave of gradients, parameters and buffers."""
    model, schedule, options = made(case)
    torch.manual_seed(2)
    found: dict[str, Tensor] = {}
    options = {"transport": "threads"} | options
    with fxsched.backend(schedule, passes=list(passes), **options) as backend:
        compiled = torch.compile(model, backend=backend)
        for step in range(2):
            loss = compiled(*inputs())
            if "optimizer" not in options:
                loss.backward()
            found[f"loss {step}"] = loss.detach().clone()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[f"gradient {step} of {name}"] = parameter.grad.clone()
                    parameter.data -= 0.1 * parameter.grad
                    parameter.grad = None
        found |= {name: value.clone() for name, value in model.state_dict().items()}
    return found


unchanged = functools.cache(outcome)  # is eager's, or the replay's: other tests say so


def is_equal(case: Case, mutant: Mutant) -> bool:
    """Whether two steps of the mutant are as those of the sound programs."""

    def wrong(program: fx.GraphModule, request: Any) -> fx.GraphModule:
        worker = next(n.meta["worker"] for n in program.graph.nodes if "n" in n.meta)
        if worker == mutant.worker:
            mutated(program, mutant.seed)
        return program

    found, wanted = outcome(case, wrong), unchanged(case)
    return found.keys() == wanted.keys() and all(
        torch.allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6)
        for name in wanted
    )


def verdict_of(case: Case, mutant: Mutant) -> str:
    """ "found", "equal" or "wrong"."""
    plan, *_ = planned(case)
    try:
        dataclasses.replace(plan, programs=mutant.programs).check()
    except CheckError:
        return "found"
    try:
        return "equal" if is_equal(case, mutant) else "wrong"
    except CheckError:  # of programs for the transport
        return "found"
    except Exception as error:
        print(f"raises {type(error).__name__}: {str(error)[:200]}")
        return "wrong"


# Mutants of the passes


def wrong_graph(gm: fx.GraphModule, draw: random.Random) -> str | None:
    """A graph of stages with another predecessor, other weights or another sum: what a
    wrong pass would make of the right graph."""
    nodes = list(gm.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    node, value = draw.choice(reads(gm))
    if node.target is operator.getitem and draw.random() < 0.8:
        return None
    others = [n for n in nodes[: at[node]] if n is not value and same_kind(n, value)]
    if node.target is ops.add and draw.random() < 0.5:
        node.args = (*node.args[1:], node.args[1])
        return f"{node} adds up {node.args}"
    if node.target is ops.loss_gradient:
        node.args = (node.args[0], 0.5)
        return f"{node} is scaled by 0.5"
    if not others:
        return None
    other = draw.choice(others)
    node.replace_input_with(value, other)
    return f"{node} reads {other} for {value}"


def wrong_lines(step: Step, draw: random.Random) -> str | None:
    """A line that takes another value of its worker's, of the same shape, or leaves out
    what it adds up, or that is left out."""
    lines = [each for each in step.lines if isinstance(each, Op) and each.args]
    if not lines:
        return None
    line = draw.choice(lines)
    values = [v for v in values_in(line.args) if isinstance(v, (JobOutput, Op))]
    if not values:
        return None
    old = draw.choice(values)
    place = list(step.lines).index(line)
    others = [
        v
        for v in _values(step, list(step.lines)[:place])
        if v != old and step.specs(v) == step.specs(old)
    ]
    if line.target in (ops.reduce, ops.add) and len(values) > 1 and draw.random() < 0.3:
        line.args = tuple(each for each in line.args if each is not old)
        if line.target is ops.reduce:
            line.args = (0, *line.args[1:])
        return f"{line} leaves out {old}"
    if not others:
        return None
    other = draw.choice(others)
    line.args = with_values(line.args, lambda v: other if v == old else v)
    return f"{line} reads {other} for {old}"


def _values(step: Step, lines: Sequence[Any]) -> Iterator[Any]:
    """What lines make, on any worker."""
    for line in lines:
        if line.target is None and line.job is not None:
            recipe = step.recipes[step.jobs.at[line.job.stage, line.job.direction]]
            for node in recipe.after:
                yield JobOutput(node, line.job.microbatch)
        elif line.specs:
            yield line


def of_the_passes(case: Case, seed: int) -> tuple[str, Plan] | None:
    """A plan whose passes do something wrong, with the reference of the right one."""
    plan, cut, request = planned(case)
    draw, what = random.Random(seed), None
    graph = fx.Graph()
    graph.output(graph.graph_copy(cut.graph.graph, {}))
    gm = fx.GraphModule(cut.graph, graph)
    gm.meta.update(cut.graph.meta)
    before = pipeline.STEP_PASSES
    if draw.random() < 0.5:
        what = wrong_graph(gm, draw)
    else:

        def wrong(step: Step, request: Any) -> Step:
            nonlocal what
            what = wrong_lines(step, draw)
            return step

        place = [each.__name__ for each in before].index("route_values")
        pipeline.STEP_PASSES = (*before[:place], wrong, *before[place:])
    try:
        with Progress() as progress:
            made = pipeline.make_plan(cut._replace(graph=gm), request, (), progress)
            programs = tuple(made.programs)
    except Exception:  # a step that can't be written
        return None
    finally:
        pipeline.STEP_PASSES = before
    if what is None or _text(programs) == _text(plan.programs):
        return None
    return what, dataclasses.replace(made, programs=programs, reference=plan.reference)


def _text(programs: Sequence[fx.GraphModule]) -> list[str]:
    return [str(program.graph) for program in programs]


def is_found(plan: Plan) -> bool:
    try:
        plan.check()
    except CheckError:
        return True
    return False


# Runs


def run_programs(count: int, seed: int, names: Sequence[str]) -> Counter[str]:
    """So many mutants of programs, dealt out to the plans; prints those not found."""
    counts: Counter[str] = Counter()
    every = [case for case in cases() if not names or str(case) in names]
    for i, case in enumerate(every):
        wanted = count // len(every) + (i < count % len(every))
        seeds = iter(range(seed + 10_000 * i, seed + 10_000 * (i + 1)))
        for mutant, _ in zip(mutants(case, seeds), range(wanted), strict=False):
            verdict = verdict_of(case, mutant)
            counts[verdict] += 1
            if verdict != "found":
                where = f"{case}, worker {mutant.worker}, seed {mutant.seed}"
                print(f"{verdict}: {where}: {mutant.what}", flush=True)
    return counts


def run_passes(count: int, seed: int, names: Sequence[str]) -> Counter[str]:
    """So many mutants of the passes; prints those not found."""
    counts: Counter[str] = Counter()
    every = [case for case in cases() if not names or str(case) in names]
    tried = 0
    while sum(counts.values()) < count and tried < 50 * count:
        case = every[tried % len(every)]
        mutant = of_the_passes(case, seed + tried)
        tried += 1
        if mutant is None:
            continue
        what, plan = mutant
        verdict = "found" if is_found(plan) else "wrong"
        counts[verdict] += 1
        if verdict != "found":
            print(f"{verdict}: {case}, seed {seed + tried - 1}: {what}", flush=True)
    return counts


def main() -> int:
    """Runs both; 1 if a mutant is called sound and isn't equal."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__
    )
    parser.add_argument("--programs", type=int, default=2000, help="how many of these")
    parser.add_argument(
        "--passes", type=int, default=100, help="how many of the passes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", action="append", default=[], help="'tied ddp', ..")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, wrong = time.perf_counter(), 0
    for what, run, count in (
        ("programs", run_programs, options.programs),
        ("the passes", run_passes, options.passes),
    ):
        counts = run(count, options.seed, options.plan)
        wrong += counts["wrong"]
        kinds = ", ".join(
            f"{counts[kind]} {kind}" for kind in ("found", "equal", "wrong")
        )
        print(f"{sum(counts.values())} mutants of {what}: {kinds}", flush=True)
    print(f"{len(cases())} plans; {time.perf_counter() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
