"""The verifier finds faults that are planted into sound programs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsched
from fxsched import CheckError, Job, Placement, Plan, Schedule, schedules
from fxsched import pipeline as passes_in_order
from fxsched.checker.check_messages import check_summaries
from fxsched.checker.symbols import Symbol
from fxsched.ir import ops
from fxsched.ir.meta import GRAPH_META, KEYS
from fxsched.ir.step import Step


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))).mean()


@functools.cache
def planned(name: str) -> Plan:
    schedule = schedules.gpipe(2, 2)
    if name == "crossed":
        schedule = Schedule(2, 2, 2, w=lambda s, b, d: Placement(b, (b + s) % 2))
    if name == "split":
        schedule = schedules.zb_h1(2, 2)
    return fxsched.plan(Chain(), schedule, torch.ones(4, 3))


def copied(plan: Plan) -> Plan:
    """The plan with programs and placements of its own, to be damaged."""
    programs = []
    for program in plan.programs:
        graph = fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
        programs.append(fx.GraphModule(program, graph))
    return dataclasses.replace(plan, programs=tuple(programs))


def pipeline() -> Plan:
    """Stage s on worker s, two microbatches."""
    return copied(planned("pipeline"))


def crossed() -> Plan:
    """Both workers keep all weights; microbatch b starts on worker b, ends on the
    other, so that weights are fetched and gradients reduced."""
    return copied(planned("crossed"))


def split() -> Plan:
    """As pipeline, with weight gradients in jobs of their own."""
    return copied(planned("split"))


def find(program: fx.GraphModule, target: object, **kwargs: int) -> fx.Node:
    """The first call of `target` with these keyword arguments."""
    return next(
        n
        for n in program.graph.nodes
        if n.target is target and kwargs.items() <= n.kwargs.items()
    )


def named(program: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in program.graph.nodes if n.name == name)


def free_of(value: fx.Node) -> fx.Node:
    return next(user for user in value.users if user.target is ops.free)


def reader_of(value: fx.Node) -> fx.Node:
    return next(user for user in value.users if user.target is not ops.free)


def results(program: fx.GraphModule) -> dict[str, Any]:
    found: Any = program.graph.output_node().args[0]
    return {key: dict(v) if isinstance(v, dict) else v for key, v in found.items()}


def expect_tensor(recv: fx.Node, **change: object) -> None:
    (spec,) = recv.meta["specs"]
    recv.meta["specs"] = (spec._replace(**change),)


# Each fault damages one plan, and the message says what it did.
Fault = Callable[[Plan], object]


def dropped_send(plan: Plan) -> None:
    program = plan.programs[0]
    program.graph.erase_node(find(program, ops.send, to=1))


def dropped_recv(plan: Plan) -> None:
    first, second = (find(plan.programs[1], ops.recv, tag=tag) for tag in (0, 1))
    first.replace_all_uses_with(second)
    plan.programs[1].graph.erase_node(first)


def swapped_recvs(plan: Plan) -> None:
    first, second = (find(plan.programs[1], ops.recv, tag=tag) for tag in (0, 1))
    first.prepend(second)


def one_tag_twice(plan: Plan) -> None:
    send = find(plan.programs[0], ops.send, tag=1)
    send.kwargs = {"to": 1, "tag": 0}


def wrong_source(plan: Plan) -> None:
    recv = find(plan.programs[1], ops.recv, tag=0)
    recv.kwargs = {"source": 1, "tag": 0}


def wrong_shape(plan: Plan) -> None:
    expect_tensor(find(plan.programs[1], ops.recv, tag=0), shape=(2, 5))


def wrong_type(plan: Plan) -> None:
    expect_tensor(find(plan.programs[1], ops.recv, tag=0), dtype=torch.float64)


def missing_free(plan: Plan) -> None:
    program = plan.programs[0]
    program.graph.erase_node(free_of(named(program, "relu_0")))


def double_free(plan: Plan) -> None:
    free = free_of(named(plan.programs[0], "relu_0"))
    with plan.programs[0].graph.inserting_after(free):
        plan.programs[0].graph.node_copy(free)


def read_after_free(plan: Plan) -> None:
    value = named(plan.programs[0], "x_0")
    with plan.programs[0].graph.inserting_after(value):
        free = plan.programs[0].graph.call_function(ops.free, (value,))
    free.meta.update(value.meta, specs=())


def sent_after_free(plan: Plan) -> None:
    value = named(plan.programs[0], "relu_0")
    value.append(free_of(value))


def read_before_made(plan: Plan) -> None:
    value = named(plan.programs[0], "x_0")
    reader_of(value).append(value)


def circle(plan: Plan) -> None:
    """Worker 0 waits for the gradient before it sends the activation."""
    gradient = find(plan.programs[0], ops.recv, source=1, tag=2)
    find(plan.programs[0], ops.send, tag=0).prepend(gradient)


def send_to_itself(plan: Plan) -> None:
    graph = plan.programs[0].graph
    send = find(plan.programs[0], ops.send, tag=0)
    send.kwargs = {"to": 0, "tag": 0}
    value = send.args[0]
    assert isinstance(value, fx.Node)
    with graph.inserting_after(send):
        recv = graph.call_function(ops.recv, (), {"source": 0, "tag": 0})
    recv.meta = dict(value.meta)
    old = find(plan.programs[1], ops.recv, tag=0)
    old.replace_all_uses_with(find(plan.programs[1], ops.recv, tag=1))
    plan.programs[1].graph.erase_node(old)


def job_twice(plan: Plan) -> None:
    job = named(plan.programs[0], "job_0F1")
    with plan.programs[0].graph.inserting_after(job):
        plan.programs[0].graph.node_copy(job)


def job_never(plan: Plan) -> None:
    """The first microbatch's B counts for both."""
    first, second = (named(plan.programs[0], f"job_0B{b}") for b in (0, 1))
    second.replace_all_uses_with(first)
    plan.programs[0].graph.erase_node(second)


def job_elsewhere(plan: Plan) -> None:
    """w says worker 1, the program is worker 0's."""
    jobs = plan.reference.jobs
    number = jobs.number(Job.parse("0F0"))
    workers = [1 if i == number else w for i, w in enumerate(jobs.worker)]
    reference = copy.copy(plan.reference)
    reference.jobs, reference.by_worker = dataclasses.replace(jobs, worker=workers), {}
    object.__setattr__(plan, "reference", reference)


def gradient_misses_a_microbatch(plan: Plan) -> None:
    total = find(plan.programs[0], ops.accumulate)
    total.args = total.args[:1]


def gradient_counts_a_microbatch_twice(plan: Plan) -> None:
    total = find(plan.programs[0], ops.accumulate)
    total.args = (total.args[1], total.args[1])


def reduce_misses_a_worker(plan: Plan) -> None:
    whole = find(plan.programs[0], ops.reduce)
    whole.args = whole.args[:2]


def owner_gets_another_group(plan: Plan) -> None:
    output = plan.programs[1].graph.output_node()
    changed = results(plan.programs[1])
    groups = changed["groups"]
    changed["groups"] = {"0": groups["1"], "1": groups["0"]}
    output.args = (changed,)


def owner_gets_no_gradient(plan: Plan) -> None:
    graph, changed = plan.programs[1].graph, results(plan.programs[1])
    lost = changed["groups"].pop("0")
    graph.output_node().args = (changed,)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(ops.free, (lost,)).meta.update(lost.meta, specs=())


def as_one_task(program: fx.GraphModule, *tasks: str) -> None:
    for node in program.graph.nodes:
        if node.target is not ops.recv and node.meta.get("task") in tasks:
            node.meta["task"] = "one"


def tasks_that_wait_for_each_other(plan: Plan) -> None:
    """A task starts once all that it reads is there, but F and B take turns."""
    as_one_task(plan.programs[0], "0F0", "0B0")
    as_one_task(plan.programs[1], "1F0", "1B0")


def task_that_waits_for_what_follows_it(plan: Plan) -> None:
    as_one_task(plan.programs[0], "0F0", "0B0")


def w_of_another_microbatch(plan: Plan) -> None:
    job, other = (named(plan.programs[0], name) for name in ("job_0W1", "job_0B0"))
    carried = next(user for user in other.users if user.name == "carried_0_0")
    job.args = (job.args[0], carried, None)


def b_gives_a_gradient_too(plan: Plan) -> None:
    """B's part of a weight's gradient is added to that of W, which has it already."""
    program = plan.programs[0]
    total = find(program, ops.accumulate)
    part = named(program, "carried_0_0")
    part.meta["group"] = 0
    with program.graph.inserting_before(total):
        more = program.graph.call_function(ops.accumulate, (total.args[0], part))
    more.meta.update(total.meta)
    total.args = (more, total.args[1])
    for free in program.graph.find_nodes(op="call_function", target=ops.free):
        kept = [a for a in free.args if a not in (part, total.args[0])]
        free.args = tuple(kept)
    with program.graph.inserting_after(total):
        freed = program.graph.call_function(ops.free, (part, more))
    freed.meta.update(total.meta, specs=())


def w_of_another_stage(plan: Plan) -> None:
    named(plan.programs[0], "job_0W0").target = "weight_1"


IN_SPLIT: dict[Fault, str] = {
    b_gives_a_gradient_too: r"group 0 in which 0B0 is missing or counted twice",
    w_of_another_stage: r"worker 0: 0W0 calls weight_1",
    gradient_misses_a_microbatch: r"worker 0 gets a gradient of group 0 in which 0W1 ",
    w_of_another_microbatch: r"weight_0 of 0W1 reads carried_0_0 after its free",
}
IN_PIPELINE: dict[Fault, str] = {
    dropped_send: r"worker 1: recv\(tag=0\) of 0F0 has no send",
    dropped_recv: r"worker 0: send\(tag=0\) of 0F0 has no recv",
    swapped_recvs: r"worker 0 sends tag 0 to worker 1, which receives tag 1",
    one_tag_twice: r"tag 0 is used twice: worker 0: send\(tag=0\) of 0F1",
    wrong_source: r"send\(tag=0\) of 0F0 and worker 1: .* name different workers",
    wrong_shape: r"sends float32\[2, 4\], but worker 1: .* expects float32\[2, 5\]",
    wrong_type: r"sends float32\[2, 4\], but worker 1: .* expects float64\[2, 4\]",
    missing_free: r"worker 0 never frees relu_0",
    double_free: r"worker 0: free of 0F0 frees relu_0 after its free",
    read_after_free: r"worker 0: forward_0 of 0F0 reads x_0 after its free",
    sent_after_free: r"worker 0: send\(tag=0\) of 0F0 reads relu_0 after its free",
    read_before_made: r"worker 0: forward_0 of 0F0 reads x_0 before it is made",
    circle: r"wait for each other in a circle:\n  worker \d: send\(tag=\d\)",
    send_to_itself: r"wait for each other in a circle:\n  worker 0: send\(tag=0\)",
    tasks_that_wait_for_each_other: r"circle: one on worker [01], one on worker [01]",
    task_that_waits_for_what_follows_it: r"tasks wait for each other in a circle: ",
    job_twice: r"0F1 runs 2 times",
    job_never: r"0B1 runs 0 times",
    job_elsewhere: r"0F0 runs on worker 0, but w puts it on 1",
    gradient_misses_a_microbatch: r"worker 0 gets a gradient of group 0 in which 0B1 ",
    gradient_counts_a_microbatch_twice: r"group 0 in which 0B0, 0B1 is missing or",
}
IN_CROSSED: dict[Fault, str] = {
    reduce_misses_a_worker: r"gets a gradient of group 0 in which 0B[01] is missing",
    owner_gets_another_group: r"worker 1 gets a gradient of group [01] in which",
    owner_gets_no_gradient: r"worker 1 keeps a.weight, a.bias but gets no gradient",
}


@pytest.mark.parametrize("plan", [pipeline, crossed, split])
def test_a_plan_passes(plan: Callable[[], Plan]) -> None:
    plan().check()


@pytest.mark.parametrize("fault", IN_PIPELINE, ids=lambda fault: fault.__name__)
def test_finds_in_a_pipeline(fault: Fault) -> None:
    plan = pipeline()
    fault(plan)
    with pytest.raises(CheckError, match=IN_PIPELINE[fault]):
        plan.check()


@pytest.mark.parametrize("fault", IN_CROSSED, ids=lambda fault: fault.__name__)
def test_finds_where_several_keep_the_weights(fault: Fault) -> None:
    plan = crossed()
    fault(plan)
    with pytest.raises(CheckError, match=IN_CROSSED[fault]):
        plan.check()


@pytest.mark.parametrize("fault", IN_SPLIT, ids=lambda fault: fault.__name__)
def test_finds_where_the_backward_is_split(fault: Fault) -> None:
    plan = split()
    fault(plan)
    with pytest.raises(CheckError, match=IN_SPLIT[fault]):
        plan.check()


@pytest.mark.parametrize("plan", [pipeline, crossed, split])
def test_ranks_need_each_others_summaries_only(plan: Callable[[], Plan]) -> None:
    own = plan()
    check_summaries(
        [pickle.loads(pickle.dumps(own.examine(rank))) for rank in range(2)],
        own.reference,
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            ops.bundle,
            r"worker 2 overwrites the value that .* receives, and worker 0 reads",
        ),
        (ops.accumulate, r"worker 0 overwrites later, and worker 2: recv\(.* reads it"),
    ],
    ids=["read again", "written"],
)
def test_threads_share_what_is_sent(target: Any, message: str) -> None:
    """Worker 2 adds up what comes in the place of the first, which is worker 0's."""
    schedule = schedules.parameter_server(3, 2)
    plan = copied(fxsched.plan(Chain(), schedule, torch.ones(4, 3)))
    plan.check()
    total = find(plan.programs[2], ops.reduce)
    place: Any = total.args[1]
    assert place.kwargs["source"] == 0
    graph = plan.programs[0].graph
    send = find(plan.programs[0], ops.send, tag=place.kwargs["tag"])
    (value,) = send.all_input_nodes
    free = free_of(value)
    args = (value,) if target is ops.bundle else (value, value)
    with graph.inserting_after(send):
        new = graph.call_function(target, args)
    new.meta.update(value.meta, task=send.meta["task"])
    new.meta.pop("group", None)
    free.args = (*free.args, new)
    new.append(free)
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_owners_of_a_gradient_add_it_up_in_one_order() -> None:
    plan = crossed()
    summaries = [plan.examine(rank) for rank in range(2)]
    claims = summaries[1].claims
    i = next(i for i, each in enumerate(claims) if each.wanted[:1] == ("gradient",))
    terms = plan.reference.gradient(*claims[i].wanted[1:])[1:]
    for order in (terms, terms[::-1]):
        claims[i] = claims[i]._replace(actual=Symbol(("sum", *order)))
        if order is terms:
            check_summaries(summaries, plan.reference)
            continue
        with pytest.raises(CheckError, match="to get the same bits"):
            check_summaries(summaries, plan.reference)


def test_a_pass_changes_a_stage_on_all_workers_alike() -> None:
    def slower(program: fx.GraphModule, request: object, workers: str) -> Any:
        worker = next(n.meta["worker"] for n in program.graph.nodes if "n" in n.meta)
        for _, flat in fxsched.passes.stage_graphs(program):
            for node in flat.graph.nodes if str(worker) in workers else ():
                if node.target is torch.ops.aten.relu.default:
                    node.target = torch.ops.aten.abs.default
        return program

    def planned_with(workers: str) -> Plan:
        alike = functools.partial(slower, workers=workers)
        x = torch.ones(4, 3)
        return fxsched.plan(Chain(), schedules.ddp(2, 2), x, passes=[alike])

    planned_with("01").check()
    with pytest.raises(CheckError, match=r"changes forward_\d on worker 1 otherwise"):
        planned_with("1").check()


def test_a_stage_that_a_pass_changes_without_a_word_is_found() -> None:
    plan = pipeline()
    stage = plan.programs[1].get_submodule("forward_1")
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.graph, {}))  # type: ignore[arg-type]
    output = graph.output_node()
    with graph.inserting_before(output):
        first = output.args[0][0]  # type: ignore[index]
        twice = graph.call_function(torch.mul, (first, 2))
    output.replace_input_with(first, twice)  # type: ignore[arg-type]
    plan.programs[1].forward_1 = fx.GraphModule(stage, graph)
    with pytest.raises(CheckError, match="worker 1: forward_1 computes something else"):
        plan.check()


@pytest.mark.parametrize(
    "fault",
    [job_twice, job_never, missing_free, read_before_made],
    ids=lambda fault: fault.__name__,
)
def test_a_program_shows_by_itself(fault: Fault) -> None:
    plan = pipeline()
    fault(plan)
    found = plan.examine(0).fault
    assert found is not None and re.search(IN_PIPELINE[fault], found)
    assert plan.examine(1).fault is None


def test_a_pass_of_the_users_own_is_checked_before_anything_runs() -> None:
    def drop_sends(program: fx.GraphModule, request: object) -> fx.GraphModule:
        for send in program.graph.find_nodes(op="call_function", target=ops.send):
            program.graph.erase_node(send)
        return program

    backend = fxsched.backend(schedules.gpipe(2, 2), passes=[drop_sends])
    with pytest.raises(CheckError, match=r"recv\(tag=\d\) of 1B0 has no send"):
        torch.compile(Chain(), backend=backend)(torch.ones(4, 3))


def test_finds_an_activation_of_another_microbatch() -> None:
    plan = pipeline()
    first, second = (find(plan.programs[0], ops.send, tag=tag) for tag in (0, 1))
    later = first.args[0]
    second.args, first.args = first.args, second.args
    second.append(free_of(later))  # type: ignore[arg-type]
    second.prepend(first)
    message = "reads recv_0, which is result 0 of 0F1; it should be result 0 of 0F0"
    with pytest.raises(CheckError, match=message):
        plan.check()


def test_finds_a_group_without_any_gradient() -> None:
    plan = pipeline()
    graph, changed = plan.programs[0].graph, results(plan.programs[0])
    lost = changed["groups"].pop("0")
    graph.output_node().args = (changed,)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(ops.free, (lost,)).meta.update(lost.meta, specs=())
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta.pop("group", None)
    with pytest.raises(CheckError, match=r"a\.weight"):
        plan.check()


def test_finds_a_later_task_that_waits_for_what_follows_it() -> None:
    plan = pipeline()
    as_one_task(plan.programs[0], "0F1", "0B1")
    with pytest.raises(CheckError, match="tasks wait for each other in a circle"):
        plan.check()


def test_the_check_reads_nothing_of_what_wrote_the_programs() -> None:
    plan = pipeline()
    dataclasses.replace(plan, outputs=(), step=Step(plan.step.graph)).check()


def test_passes_leave_only_declared_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[str], set[str]]] = []

    def looked(each: Any) -> Any:
        def run(gm: fx.GraphModule, request: Any) -> fx.GraphModule:
            gm = each(gm, request)
            seen.append(({key for n in gm.graph.nodes for key in n.meta}, set(gm.meta)))
            return gm

        return run

    rewrites = tuple(map(looked, passes_in_order.GRAPH_PASSES))
    monkeypatch.setattr(passes_in_order, "GRAPH_PASSES", rewrites)
    fxsched.plan(Chain(), schedules.fslpp(2, 1, 4), torch.ones(4, 3))
    assert len(seen) == len(rewrites)
    for facts, graph_facts in seen:
        assert facts <= KEYS
        assert graph_facts <= set(GRAPH_META)
