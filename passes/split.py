"""Turns the traced graph into one node per stage."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from ..clock.stage_record import Edge, Stage
from ..ir import joint
from ..ir.encodings import sent_bytes
from ..ir.facts import FACTS, StageFacts, facts
from ..ir.graphs import (
    REGION_ENTERS,
    REGION_EXITS,
    Group,
    Role,
    Spec,
    Specs,
    State,
    in_type,
    module_prefixes,
    numbered_draws,
    result,
    storage,
    written_storages,
)
from ..ir.lazy import lazy_module
from ..ir.meta import note_call, of_call, of_node
from ..ir.request import Device, Request
from ..jobs.job import Job, PlanError
from ..partition.costs import send_seconds, update_seconds
from .stage_builder import Port, StageBuilder, reads_whole

LITTLE = 0.02  # of a stage's work, below which a part of a module isn't named


def split_stages(gm: fx.GraphModule, request: Request) -> fx.GraphModule:
    """Makes each stage a submodule, called with the state and the values that it reads.

    before: a = linear(x, w0, b0)   # stage 0
            b = linear(a, w1, b1)   # stage 1
    after:  stage_0 = self.stage_0((weights_0,), (x,)); a = stage_0[0]
            stage_1 = self.stage_1((weights_1,), (a,)); b = stage_1[0]

    weights_0 is a group: the parameters and buffers with the same owners and readers.
    facts(gm).stages describes the stages as a networkx.DiGraph.
    """
    keep = request.deterministic and request.training
    inner = [StageBuilder(gm, nodes, keep) for nodes in _by_stage(gm)]
    groups = _group_state(gm, [stage.state for stage in inner], request)
    stages = _describe(inner, request, bool(facts(gm).pieces))
    if facts(gm).pieces:
        stages = nx.relabel_nodes(stages, dict(enumerate(facts(gm).pieces)))
    if request.moments:
        _describe_moments(stages, inner, request.moments)
    calls = _Calls(gm, groups, request.schedule.microbatches)
    for number in nx.lexicographical_topological_sort(stages):
        calls.add(number, inner[number])
    calls.graph.output(fx.map_arg(result(gm), calls.new.__getitem__))
    whole = lazy_module(gm, calls.graph, "Stages")
    whole.meta[FACTS] = replace(facts(gm), groups=tuple(groups), stages=stages)
    return whole


class _Calls:
    """The graph that calls the stages."""

    def __init__(
        self, gm: fx.GraphModule, groups: list[Group], microbatches: int
    ) -> None:
        self.gm, self.groups, self.graph = gm, groups, fx.Graph()
        self.microbatches = microbatches
        self.new: dict[fx.Node, fx.Node] = {}  # values, by those of the traced graph
        self.drawn = numbered_draws(gm.graph.nodes)
        self.measured = any("estimated" in of_node(node) for node in gm.graph.nodes)
        inputs = gm.graph.find_nodes(op="placeholder")
        values = {of_node(node)["index"]: of_node(node)["val"] for node in inputs}
        self.weights = [
            self._weights(number, [Spec.of(values[each.input]) for each in group.state])
            for number, group in enumerate(groups)
        ]
        for node in inputs:
            if of_node(node)["role"] is Role.BATCH:
                self._input(node)

    def _weights(self, number: int, specs: list[Spec]) -> fx.Node:
        new = self.graph.placeholder(f"weights_{number}")
        note_call(new, group=number, specs=tuple(specs), bundle=True)
        return new

    def _input(self, node: fx.Node) -> None:
        index, dim, fake = (node.meta[key] for key in ("index", "dim", "val"))
        new = self.new[node] = self.graph.placeholder(node.name)
        note_call(new, input=index, dim=dim, val=fake, specs=(Spec.of(fake),))

    def add(self, number: int, stage: StageBuilder) -> None:
        """Calls a stage with what it reads, and takes its result apart."""
        used = [i for i, group in enumerate(self.groups) if number in group.stages]
        weights = tuple(self.weights[i] for i in used)
        inputs = tuple(self._read(port, stage.joint) for port in stage.inputs)
        call = self.graph.call_module(f"stage_{number}", (weights, inputs))
        draws = [each for node in stage.nodes for each in self.drawn[node]]
        first = draws[0].number if draws else -1 - number
        note_call(call, stage=number, draw=first)
        place = {
            each.input: (j, k)
            for j, i in enumerate(used)
            for k, each in enumerate(self.groups[i].state)
        }
        stage.module.meta[FACTS] = StageFacts(
            [place[of_node(node)["index"]] for node in stage.state],
            tuple(each._replace(number=each.number - first) for each in draws),
            _seconds(stage.nodes) if self.measured else None,
        )
        self.gm.add_submodule(f"stage_{number}", stage.module)
        parts: dict[fx.Node, list[fx.Node]] = {}
        for position, (node, microbatch) in enumerate(stage.outputs):
            value = self._output(call, position, node)
            if microbatch is not None:
                parts.setdefault(node, []).append(value)
        for node, values in parts.items():
            self.new[node] = self._pointer(joint.each, tuple(values), values[0])

    def _read(self, port: Port, by_joint: bool) -> fx.Node:
        value = self.new[port.node]
        if port.microbatch is not None:
            return self._pointer(joint.of, (value, port.microbatch), value)
        if reads_whole(port.node, by_joint):
            same = (value,) * self.microbatches
            return self._pointer(joint.each, same, value)
        return value

    def _pointer(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, args)
        new.meta.update({key: like.meta[key] for key in ("val", "specs")})
        return new

    def _output(self, call: fx.Node, position: int, node: fx.Node) -> fx.Node:
        fake, name = of_node(node)["val"], node.name[:20]
        new = self.new[node] = self.graph.create_node(
            "call_function", operator.getitem, (call, position), name=name
        )
        whole = torch.empty_like(fake, memory_format=torch.contiguous_format)
        stage = of_node(call)["stage"]
        note_call(new, val=fake, specs=(Spec.of(whole),), stage=stage)
        of_call(new)["trained"] = fake.requires_grad
        return new


def _seconds(nodes: list[fx.Node]) -> tuple[float, float]:
    """Of F and of B of a stage's nodes."""
    work = [of_node(node)["work"] for node in nodes if "work" in of_node(node)]
    return sum(w.forward for w in work), sum(w.backward for w in work)


def _by_stage(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each stage; those that open and close regions are in all."""
    last = max((of_node(node).get("stage", 0) for node in gm.graph.nodes), default=0)
    by_stage: list[list[fx.Node]] = [[] for _ in range(last + 1)]
    for node in gm.graph.nodes:
        if node.target in (*REGION_ENTERS, *REGION_EXITS):
            for nodes in by_stage:
                nodes.append(node)
        elif "stage" in of_node(node):
            by_stage[of_node(node)["stage"]].append(node)
    return by_stage


def stage_owners(request: Request, stage: int) -> tuple[int, ...]:
    """The workers on which w puts the weights of a stage's jobs."""
    schedule = request.schedule
    return tuple(
        sorted(
            {
                schedule.place(Job(stage, b, d)).weights
                for b in range(max(schedule.microbatches, request.most))
                for d in schedule.directions
            }
        )
    )


def _group_state(
    gm: fx.GraphModule, state: list[list[fx.Node]], request: Request
) -> list[Group]:
    """Groups of state with the same owners, readers and fate."""
    owners_of = [stage_owners(request, stage) for stage in range(len(state))]
    pieces = facts(gm).pieces
    readers: dict[fx.Node, list[int]] = {}
    for stage, nodes in enumerate(state):
        for node in nodes:
            readers.setdefault(node, []).append(stage)
    written = _written_state(gm)
    updates = request.schedule.update_every is not None
    by_key: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node, stages in readers.items():
        first = stages[:1]
        if pieces:  # each shard keeps what all of them read
            first = [s for s in stages if pieces[s].stage == pieces[stages[0]].stage]
        owned, updater = _keepers(node, stages, first, owners_of, request)
        trained = updates and of_node(node)["val"].requires_grad
        apart = -1 if updater is None else updater, trained
        key = (stages[0], tuple(stages), owned, node in written, *apart)
        by_key.setdefault(key, []).append(node)
    return [
        Group(
            tuple(
                State(of_node(n)["index"], of_node(n)["role"], of_node(n)["name"])
                for n in nodes
            ),
            owned,
            stages,
            tuple(of_node(n)["val"].requires_grad for n in nodes),
            written=is_written,
            updater=None if updater < 0 else updater,
        )
        for (_, stages, owned, is_written, updater, _), nodes in sorted(
            by_key.items(), key=lambda item: item[0]
        )
    ]


def _keepers(
    node: fx.Node,
    stages: Sequence[int],
    first: Sequence[int],
    owners_of: Sequence[tuple[int, ...]],
    request: Request,
) -> tuple[tuple[int, ...], int | None]:
    """The workers that keep a tensor of the state, and the one that updates it, if u
    says.

    A parameter is kept by the owners of the `first` stage that reads it, so that a tied
    one counts once, and by who updates it; a buffer by those of all stages that read
    it; an input that is not cut into microbatches is at hand on every worker.
    """
    role, index = of_node(node)["role"], of_node(node)["index"]
    updater = of_node(node).get("updater", request.updaters.get(index))
    if (
        updater is None
        and role is Role.PARAMETER
        and of_node(node)["val"].requires_grad
    ):
        updater = request.schedule.updater(stages[0])
    if role is Role.SHARED:
        owned = tuple(range(request.schedule.workers))
    elif "owners" in of_node(node) or index in request.owners:
        owned = of_node(node).get("owners") or request.owners[index]
    elif role is Role.PARAMETER:
        owned = tuple(sorted({w for stage in first for w in owners_of[stage]}))
        if updater is not None:
            owned = tuple(sorted({*owned, updater}))
    else:
        owned = tuple(sorted({w for stage in stages for w in owners_of[stage]}))
    if updater is not None and updater not in owned:
        raise PlanError(
            f"u({stages[0]}, b) is {updater}, which does not keep "
            f"{of_node(node)['name']}: since an earlier plan workers "
            f"{', '.join(map(str, owned))} do; give the same u to all backends"
        )
    return owned, updater


def _written_state(gm: fx.GraphModule) -> set[fx.Node]:
    written = written_storages(gm.graph)
    kept = {o.state for o in facts(gm).outputs if not o.replaced and o.kind != "given"}
    return {
        n
        for n in gm.graph.find_nodes(op="placeholder")
        if storage(of_node(n)["val"]) in written or of_node(n)["index"] in kept
    }


def _send_state(state: list[fx.Node], request: Request) -> float:
    """Seconds to send parameters and buffers to another worker."""
    if not state:
        return 0.0
    device, size = Spec.of(of_node(state[0])["val"]).device, 0
    for node in state:
        fixed = of_node(node)["role"] is not Role.PARAMETER
        how = None if fixed else request.encode.weights
        size += sent_bytes((Spec.of(of_node(node)["val"]),), how)
    return send_seconds(size, device, request.link, request.device)


def _update_seconds(parameters: list[Tensor], target: Device | None) -> float:
    """Seconds for a step of the optimizer on those that are trained."""
    trained = [Spec.of(value) for value in parameters if value.requires_grad]
    if not trained:
        return 0.0
    size = sum(spec.bytes for spec in trained)
    return update_seconds(size, trained[0].device, target)


def _kept_bytes(state: list[fx.Node], dtype: torch.dtype | None) -> int:
    """Bytes of weights, and of their gradients."""
    return sum(Spec.of(of_node(n)["val"]).bytes for n in state) + _sum_bytes(
        state, dtype
    )


def _sum_bytes(state: list[fx.Node], dtype: torch.dtype | None) -> int:
    """Bytes of sums of weights' gradients, in a type or their own."""
    trained = [
        Spec.of(of_node(n)["val"])
        for n in state
        if of_node(n)["role"] is Role.PARAMETER and of_node(n)["val"].requires_grad
    ]
    return sum(spec.bytes for spec in in_type(tuple(trained), dtype))


def _is_table(node: fx.Node) -> bool:
    """Whether embeddings alone read a weight, some rows at a time."""
    names = [getattr(user.target, "__name__", str(user.target)) for user in node.users]
    return bool(names) and all("embedding" in name for name in names)


def _describe(
    inner: list[StageBuilder], request: Request, pieces: bool
) -> nx.DiGraph[int]:
    """The stages and what is sent between them. A stage that is the first to read a
    parameter counts it.

    pieces: whether stages are pieces of shards.
    """
    state_bytes, dtype = request.state_bytes, request.gradient_dtype
    stages: nx.DiGraph[int] = nx.DiGraph()
    everywhere = _count_modules(node for stage in inner for node in stage.nodes)
    seen: set[fx.Node] = set()
    for number, stage in enumerate(inner):
        fresh = [n for n in stage.state if n not in seen]
        seen.update(fresh)
        first = [n for n in fresh if of_node(n)["role"] is not Role.SHARED]
        numbers = [
            of_node(n)["val"] for n in first if of_node(n)["role"] is Role.PARAMETER
        ]
        data = Stage(
            modules=_modules(stage.nodes, everywhere),
            parameters=sum(value.numel() for value in numbers),
            fetch=_send_state(first, request),
            weights=_kept_bytes(first, dtype),
            tables=_kept_bytes([n for n in first if _is_table(n)], dtype),
            update=_update_seconds(numbers, request.device),
            flops=sum(
                of_node(n)["work"].flops for n in stage.nodes if "work" in of_node(n)
            ),
        )
        if dtype is not None:
            data["gradients"] = _sum_bytes(first, dtype)
        if state_bytes:
            positions = (of_node(n)["index"] for n in first)
            data["state"] = sum(state_bytes.get(position, 0) for position in positions)
        if stage.joint:
            data["joint"] = True
            inputs = any(port.node.op == "placeholder" for port in stage.inputs)
            data["whole_inputs"] = inputs
        stages.add_node(number, **data)
    maker = {
        port.node: number
        for number, stage in enumerate(inner)
        for port in stage.outputs
        if of_node(port.node)["stage"] == number
    }
    for number, stage in enumerate(inner):
        for node in dict.fromkeys(port.node for port in stage.inputs):
            if node in maker:
                source = _giver(node, number, maker[node])
                spec, count = _sent(node, request)
                edge = stages.get_edge_data(source, number, {"bytes": 0})
                size = edge["bytes"] + count
                link, target = request.link, request.device
                seconds = send_seconds(size, spec.device, link, target)
                sent = Edge(bytes=size, seconds=seconds)
                if pieces:
                    sent["values"] = {**edge.get("values", {}), node.name: count}
                if reads_whole(node, stage.joint):
                    sent["whole"] = edge.get("whole", 0) + count
                stages.add_edge(source, number, **sent)
    if not nx.is_directed_acyclic_graph(stages):
        raise PlanError("the stages read each other in a circle; name other stages")
    return stages


def _sent(node: fx.Node, request: Request) -> tuple[Spec, int]:
    """A value, and its bytes on the way; what the model returns travels as it is."""
    spec = Spec.of(of_node(node)["val"])
    returned = any(user.op == "output" for user in node.users)
    how = None if returned else request.encode.activations
    return spec, sent_bytes((spec,), how)


def _giver(node: fx.Node, stage: int, maker: int) -> int:
    """The stage that a value comes from: the last before it that it goes through."""
    return max((s for s in of_node(node).get("passed", ()) if s < stage), default=maker)


def _describe_moments(
    stages: nx.DiGraph[int], inner: list[StageBuilder], moments: Mapping[int, Specs]
) -> None:
    """What the optimizer keeps of each stage's weights, and averages with them."""
    seen: set[fx.Node] = set()
    for number, stage in enumerate(inner):
        fresh = [of_node(node)["index"] for node in stage.state if node not in seen]
        seen.update(stage.state)
        specs = [spec for index in fresh for spec in moments.get(index, ())]
        stages.nodes[number]["moments"] = sum(spec.bytes for spec in specs)


def _modules(nodes: list[fx.Node], everywhere: Counter[str]) -> list[str]:
    """The modules of a stage in order: the outermost that are in it as a whole, and
    those of which a part with weights, or with work, is.

    everywhere: for each module, how many nodes it and its children have.
    """
    here = _count_modules(nodes)
    seconds, kept = dict[str, float](), set[str]()
    for node in nodes:
        prefixes = module_prefixes(node)
        whole = [p for p in prefixes if here[p] == everywhere[p]]
        name = f"{prefixes[-1]} (part)" if prefixes else ""
        name = whole[0] if whole else name
        work = of_node(node).get("work")
        taken = work.forward + work.backward if work else 0.0
        seconds[name] = seconds.get(name, 0.0) + taken
        read = {of_node(each).get("role") for each in node.all_input_nodes}
        if whole or Role.PARAMETER in read:
            kept.add(name)
    least = LITTLE * sum(seconds.values())
    seconds.pop("", None)
    found = [name for name in seconds if name in kept or seconds[name] >= least]
    return found or list(seconds)


def _count_modules(nodes: Iterable[fx.Node]) -> Counter[str]:
    return Counter(prefix for node in nodes for prefix in module_prefixes(node))
