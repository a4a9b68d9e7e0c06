"""A model's graph in aten operations, before autograd: composites stay whole.

before: h = linear(x, w); h[:, 0] = 0; y = h.view(len(x), -1)
after:  h = aten.linear(x, w); h0 = aten.select(h, 1, 0); aten.fill_(h0, 0)
        y = aten.view(h, [s0, -1])

What has a body of its own stays as the tracer has it: a torch.autograd.Function, a
hook, a function that is mapped. Regions of torch.export and torch.vmap are opened.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from ..ir.graphs import name_of, named_arguments
from ..ir.lazy import lazy_module
from ..ir.meta import of_node
from ..jobs.job import PlanError
from ..placement.own_backward import HOOK, own_name
from ..torch_compat.ctc_losses import OURS
from .chosen_rows import choose_rows
from .effects import NORMS
from .functional import take_early_writes, without_writes
from .graph_inputs import placeholders, state_of, text_of
from .masked_writes import fill_by_mask
from .refusals import is_open, refusal, refuse_transforms, refused, where_of
from .vmaps import Flat, flat_vmaps

aten = torch.ops.aten
KEPT = ("module", "stack_trace", "recompute")  # of node.meta
# Functions that tracing would not see, or not as one operation, and what is taken.
AUTOGRAD: Any = torch._C._autograd
SEEN: Mapping[Any, Any] = {AUTOGRAD._get_data_attr: torch.detach, **OURS}
LINEAR = (F.linear, aten.linear.default)
# Has no gradient, which the operation itself doesn't know.
RANDINT = (torch.randint_like, aten.randint_like.default, aten.randint_like.low_dtype)
REGIONS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
CHECKS = ("_assert", "sym_constrain_range")  # of values: microbatches have others
# Raise for what has no solution by an effect of its own, which graphs of stages lack;
# these raise inside, as eager does.
CHECKS_INSIDE = {
    "linalg_inv inverse": aten.linalg_inv_ex,
    "linalg_solve": aten.linalg_solve_ex,
    "linalg_cholesky cholesky": aten.linalg_cholesky_ex,
    "linalg_lu_factor": aten.linalg_lu_factor_ex,
    "linalg_ldl_factor": aten.linalg_ldl_factor_ex,
}
CHECKED = {
    getattr(aten, name).default: checks.default
    for names, checks in CHECKS_INSIDE.items()
    for name in names.split()
    if hasattr(aten, name)  # cholesky is gone in torch 2.14
}


def aten_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A model's graph as all that plans it reads it.

    Raises PlanError, with its line, for what no plan can have.
    """
    refuse_transforms(gm)
    result = lowered(gm)
    error = refusal(result)
    if error is not None:
        raise error
    for node in placeholders(result):
        if of_node(node)["origin"] is None:  # which nothing reads
            result.graph.erase_node(node)
    result.meta["text"] = text_of(result)
    result.meta["state"] = state_of(result)
    result = without_writes(fill_by_mask(result))
    result = choose_rows(take_early_writes(result))
    hook_at_source(result)
    return result


def lowered(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph in aten operations; sizes of the batch are symbols in both.

    What a node comes to ends in one that has its name, which is often the user's for
    it.
    """
    inputs = placeholders(gm)
    values = _distinct(node.meta.get("example_value") for node in inputs)
    names = dict[fx.Node, str]()
    lowering = _Lowering(gm, names, flat_vmaps(gm), _bodies(gm))
    with _as_before(values):
        traced: fx.GraphModule = make_fx(lowering.run, pre_dispatch=True)(*values)
    for old, node in zip(inputs, placeholders(traced), strict=True):
        node.meta, names[node] = dict(old.meta), old.name
        node.target = old.name
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.graph.nodes:
        if node.target is aten.lift_fresh_copy.default:
            _write_out(traced, node, names)
        node.name = names.get(node, node.name)
        copy = new[node] = graph.node_copy(node, new.__getitem__)
        if node.op == "output":
            copy.meta = dict(gm.graph.output_node().meta)
        elif node.op != "placeholder":
            copy.meta["example_value"] = of_node(copy).pop("val", None)
        if node.target in CHECKED:
            new[node] = _checked(copy)
    graph.eliminate_dead_code(_acts)
    result = lazy_module(traced, graph)
    result.meta.update(gm.meta)
    return result


def _bodies(gm: fx.GraphModule) -> dict[fx.GraphModule, fx.GraphModule]:
    """What the bodies of backwards and hooks of the model's own come to."""
    graphs = [each for each in gm.modules() if isinstance(each, fx.GraphModule)]
    nodes = [node for each in graphs for node in each.graph.nodes if own_name(node)]
    bodies = [
        getattr(node.graph.owning_module, str(read.target))
        for node in nodes
        for read in node.all_input_nodes
        if read.op == "get_attr"
    ]
    return {body: lowered(body) for body in bodies if isinstance(body, fx.GraphModule)}


def _distinct(values: Iterable[Any]) -> list[Any]:
    """The values, with others in place of tensors that come twice: what is traced knows
    a tensor by its identity. In Dynamo's graph of a backward, the gradient of a result
    and that result, if it is saved, are one."""
    seen, result = set[int](), []
    for value in values:
        if isinstance(value, Tensor) and id(value) in seen:
            value = value.detach().requires_grad_(value.requires_grad)
        seen.add(id(value))
        result.append(value)
    return result


def _acts(node: fx.Node) -> bool:
    """Whether a node does something though nothing reads it."""
    schema, name = getattr(node.target, "_schema", None), name_of(node.target)
    acts = (
        node.is_impure()
        or isinstance(node.target, HigherOrderOperator)
        or name in NORMS
        or (schema is not None and not schema.returns)
    )
    return acts and not name.startswith(CHECKS)


def _write_out(gm: fx.GraphModule, node: fx.Node, names: dict[fx.Node, str]) -> None:
    """Writes a constant out, as the model's code does."""
    (source,) = node.all_input_nodes
    if source.op == "placeholder":  # torch.export made an input of it
        node.target = aten.clone.default
        return
    constant: Tensor = getattr(gm, str(source.target))
    for user in list(node.users):
        if user.target is aten.detach_.default:
            user.replace_all_uses_with(node)
            names[node] = names.pop(user, node.name)
            gm.graph.erase_node(user)
        elif user.target is aten.fill_.Tensor and constant.dim() == 0:
            user.target = aten.fill_.Scalar
            user.args = (user.args[0], constant.item())
    node.target, node.args = torch.tensor, (constant.tolist(),)
    node.kwargs = {"dtype": constant.dtype}


def _checked(node: fx.Node) -> fx.Node:
    """What raises inside, in the place of what raises by an effect."""
    value, target = node.meta["example_value"], CHECKED[node.target]
    names = [each.name for each in target._schema.arguments]  # A, upper or such
    given = dict(zip(names, named_arguments(node).values(), strict=False))
    node.target, node.args = target, ()
    node.kwargs = {**given, "check_errors": True}
    args, kwargs = fx.map_arg((node.args, node.kwargs), _example)
    node.meta["example_value"] = target(*args, **kwargs)
    if not isinstance(value, Tensor):
        return node
    first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta = {**node.meta, "example_value": value}
    return first


def _example(node: fx.Node) -> Any:
    return node.meta["example_value"]


@contextmanager
def _as_before(values: Sequence[Any]) -> Iterator[None]:
    """Puts back what tracing changes. Constants of the graph are no fake tensors."""
    modes = (v.fake_mode for v in values if isinstance(v, FakeTensor))
    mode = next(modes, None) or FakeTensorMode()  # of what takes no tensors
    training, allowed = torch.is_grad_enabled(), mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        with mode:
            yield
    finally:
        torch._C._set_grad_enabled(training)
        mode.allow_non_fake_inputs = allowed


class _Lowering(fx.Interpreter):
    """Runs a graph while it is traced; new nodes learn what is known of old ones.

    names: of new nodes, as the tracer has them.
    vmaps: what it comes to, by the first node of each.
    bodies: those of backwards and hooks of the model's own, lowered.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        names: dict[fx.Node, str],
        vmaps: Mapping[fx.Node, Flat],
        bodies: Mapping[fx.GraphModule, fx.GraphModule],
    ) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # errors have the node's line
        self.names, self.vmaps, self.bodies = names, vmaps, bodies

    def run_node(self, node: fx.Node) -> Any:
        graph = self._tracer().graph
        last = next(iter(reversed(graph.nodes)))
        with refused(node):
            value = self._value(node)
        if node.op in ("placeholder", "output"):
            return value
        known = {key: node.meta[key] for key in KEPT if key in node.meta}
        named = None
        while last.next.op != "root":
            last = last.next
            if "module" not in of_node(last):  # else it is of a body
                last.meta.update({"module": "", **known})
            sized = isinstance(
                of_node(last).get("val"), torch.SymInt
            )  # read of a result
            named = named if sized and named else last
        if named is not None:
            self.names.setdefault(named, node.name)
        return value

    def _tracer(self) -> Any:
        mode = get_proxy_mode()
        assert mode is not None, "it runs while it is traced"
        return mode.tracer

    def _value(self, node: fx.Node) -> Any:
        if node in self.vmaps:
            return self._flat(self.vmaps[node])
        if node.target in REGIONS:
            return self._region(node)
        if isinstance(node.target, HigherOrderOperator) or (
            node.target in LINEAR and not is_open(node)
        ):
            return self._kept(node)
        return super().run_node(node)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in RANDINT:
            args = (args[0].detach(), *args[1:])
        return super().call_function(SEEN.get(target, target), args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "contiguous":  # the method leaves no node where nothing is copied;
            return aten.contiguous.default(*args, **kwargs)  # a stage may have to copy
        return super().call_method(target, args, kwargs)

    def _flat(self, flat: Flat) -> None:
        """Runs the operations that torch.vmap comes to, in place of its nodes."""
        values = self._body(flat.gm, *(self.env[n] for n in flat.reads))
        self.env.update(dict.fromkeys(flat.nodes))
        self.env.update(zip(flat.results, values, strict=True))

    def _region(self, node: fx.Node) -> Any:
        """A region of autocast or without gradients, between its enter and exit.

        before: y = wrap_with_set_grad_enabled(False, body, x)[0]
        after:  _set_grad_enabled(False); y = mul(x, 2); _set_grad_enabled(True)
        """
        args, _ = self.fetch_args_kwargs_from_env(node)
        runs = (partial(self._body, each) for each in args)
        pairs = zip(args, runs, strict=True)
        region: Any = node.target
        return region(*(r if isinstance(a, fx.GraphModule) else a for a, r in pairs))

    def _body(self, gm: fx.GraphModule, *args: Any) -> Any:
        return _Lowering(gm, self.names, self.vmaps, self.bodies).run(*args)

    def _kept(self, node: fx.Node) -> Any:
        """Copies a node as it is; its value is the tracer's.

        Linear layers of known sizes too: to run one on symbols takes a hundred times as
        long.
        """
        tracer = self._tracer()
        args, kwargs = self.fetch_args_kwargs_from_env(node)

        def proxied(value: Any) -> Any:
            if not isinstance(value, fx.GraphModule):
                return tracer.unwrap_proxy(value)
            value = self.bodies.get(value, value)
            name = f"body_{len(tracer.graph.nodes)}"
            setattr(tracer.root, name, value)
            return tracer.create_proxy("get_attr", name, (), {})

        args, kwargs = pytree.tree_map(proxied, (tuple(args), dict(kwargs)))
        target = aten.linear.default if node.target in LINEAR else node.target
        proxy = tracer.create_proxy("call_function", target, args, kwargs)
        value = node.meta["example_value"]
        return track_tensor_tree(value, proxy, constant=None, tracer=tracer)


def hook_at_source(gm: fx.GraphModule) -> None:
    """Moves each Tensor.register_hook to its tensor, in place: it runs on the gradient
    of all that read it, those before the hook too.

    before: y = linear(x, w); half = y * 0.5; z = register_hook(y, body); out = z + half
    after:  y = linear(x, w); z = register_hook(y, body); half = z * 0.5; out = z + half

    Raises PlanError for one that reads what comes later.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in place:
        if own_name(node) != HOOK:
            continue
        tensor, body, *free = node.args
        others = [user for user in tensor.users if user is not node]
        if not others:
            continue
        if any(isinstance(n, fx.Node) and place[n] > place[tensor] for n in free):
            raise PlanError(
                "the model calls register_hook on a tensor after another operation has "
                f"read it{where_of(node)}, and the hook reads a value that is computed "
                "after the tensor; call register_hook right after the line that makes "
                "the tensor, with a hook that doesn't read later values"
            )
        tensor.append(node)
        tensor.append(body)
        tensor.replace_all_uses_with(node, lambda user, hook=node: user is not hook)
