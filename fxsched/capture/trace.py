"""From a torch.compile call to the fx graph of one microbatch.

The only file that knows Dynamo; returns.py reads some of its records. It asks Dynamo
for a symbolic batch size, then binds it to the size of a microbatch and runs the graph
on fake tensors, so that every node knows its shape and nothing in the graph is a symbol
any more.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import count
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.guards as guards
import torch.fx.experimental._config
from torch import Tensor, fx
from torch._dynamo import convert_frame
from torch._dynamo.exc import (
    ObservedException,
    TensorifyScalarRestartAnalysis,
    Unsupported,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._subclasses import FakeTensorMode

from ..costmodel.costs import Meter, Work, alone, backward_of
from ..ir.facts import FACTS, Facts
from ..ir.graphs import (
    REGION_ENTERS,
    REGION_EXITS,
    Output,
    Role,
    Spec,
    storage,
    tensors,
)
from ..ir.lazy import lazy_module
from ..ir.request import Request
from ..ir.user_line import user_line
from ..ir.writes import find_writes
from ..jobs import PlanError
from ..rows.early_values import Early, early_values
from ..rows.kinds import Kind, Rows, first_cause
from ..rows.tracker import Tracker
from ..rows.weighted_loss import Whole, part_means, parts_of_sum
from .batch import Batch, dim_of, names_of, user_tensors
from .caller import Argument, Call, owner_of, read_call
from .graph_inputs import origin_of, placeholders
from .meta_device import cpu_specs, is_meta, on_cpu
from .origins import Frame, Origins, Path, plain
from .outputs import Found, decide, describe, origins_of
from .refusals import where_of
from .returns import Returned, read_returns


def configure_dynamo() -> None:
    """Makes Dynamo compile for fxsched's backends with the settings they need.

    Its own settings, and those of other backends, stay as they are: ours hold while it
    compiles a frame for one of ours, in whatever thread. Dynamo has no hook there (its
    callbacks come after the limit is checked, and are skipped while another thread
    compiles), so this stands around the function that compiles a frame.
    """
    if getattr(convert_frame._compile, "fxsched", False):
        return
    original: Any = convert_frame._compile
    parameters = inspect.signature(original)

    @wraps(original)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        backend = _innermost(given["compiler_fn"])
        request = getattr(backend, "request", None)
        if not isinstance(request, Request):
            return original(*args, **kwargs)
        _let_go(backend)
        backend.serve(given["compiler_fn"])
        if request.schedule.microbatches > 1:
            mark_batch(read_call(given["code"], given["locals"]), request)
        with _settings():
            try:
                return original(*args, **kwargs)
            except Unsupported as error:  # Dynamo would run the frame without a word
                raise _of_frame(error) from error

    vars(compile_frame)["fxsched"] = True
    vars(convert_frame)["_compile"] = compile_frame


def _let_go(backend: Any) -> None:
    """Takes a backend out of those that Dynamo keeps for good, and whose reset() it
    calls in its own: fxsched's is one that all ranks call together."""
    known = torch._dynamo.eval_frame.cached_backends
    for key, wrapper in list(known.items()):
        if _innermost(wrapper) is backend:
            del known[key]


@contextmanager
def _settings() -> Iterator[None]:
    """Dynamo's settings for models that fxsched plans, in this thread.

    Sweeping over schedules compiles one model often; past its limit Dynamo would go on
    in eager mode with no more than a warning.
    """
    config: Any = torch._dynamo.config
    shapes: Any = torch.fx.experimental._config
    with (
        config.patch(
            recompile_limit=max(config.recompile_limit, 1024),
            accumulated_recompile_limit=max(config.accumulated_recompile_limit, 8192),
            fail_on_recompile_limit_hit=True,
            # a number in the call is a constant of the plan; a changing one is better
            # a tensor
            specialize_float=True,
            allow_rnn=True,
        ),
        # lengths that happen to equal the batch size must not share its symbol
        shapes.patch(use_duck_shape=False),
    ):
        yield


def _innermost(backend: Any) -> Any:
    """The backend that torch.compile or others wrapped."""
    while (inner := getattr(backend, "__wrapped__", None)) is not None or (
        inner := getattr(backend, "compiler_fn", None)
    ) is not None:
        backend = inner
    return backend


def ask_for_symbolic_batch(
    gm: fx.GraphModule, inputs: Sequence[Any], request: Request
) -> None:
    """Makes Dynamo trace again with a symbolic batch size, unless it has already.

    Called inside a torch.compile backend; raises Dynamo's restart signal.
    """
    nodes = placeholders(gm)
    asked = False
    for i in user_tensors(gm, inputs):
        dim = dim_of(names_of(nodes[i])[0], inputs[i], request.batch_dims)
        if dim is None or inputs[i].shape[dim] < 2:  # one row can't be cut
            continue
        known = isinstance(nodes[i].meta["example_value"].shape[dim], torch.SymInt)
        marked = getattr(inputs[i], "_dynamo_weak_dynamic_indices", ())
        if not known and dim not in marked:
            torch._dynamo.maybe_mark_dynamic(inputs[i], dim)
            asked = True
    if not asked:
        return
    # the second trace may take other branches than the one that was logged
    translator: Any = InstructionTranslator.current_tx()
    translator.speculation_log.clear()
    raise TensorifyScalarRestartAnalysis()


def mark_batch(call: Call, request: Request) -> None:
    """Asks for symbolic sizes where arguments have their samples."""
    for argument, tensor in call.tensors:
        dim = dim_of(argument, tensor, request.batch_dims)
        own = not isinstance(tensor, torch.nn.Parameter)
        if own and dim is not None and tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def note_origins(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Writes down where inputs come from, as meta["origin"], and which modules nodes
    are called in, as meta["module"].

    Called inside a torch.compile backend: Dynamo's way to an input is of no use later.
    """
    paths = [_path(_source(node), node.name) for node in placeholders(gm)]
    origins = Origins(_traced_frame(), paths, _other_paths(), inputs)
    for node, origin in zip(placeholders(gm), origins.inputs, strict=True):
        node.meta["origin"] = origin
    for node in gm.graph.nodes:
        node.meta["module"] = origins.module_name(node.meta.get("nn_module_stack", {}))


def note_arguments(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Writes down what the caller calls inputs, as meta["arguments"], and all that it
    may name, as gm.meta["call"].

    Called inside a torch.compile backend.
    """
    translator: Any = InstructionTranslator.current_tx()
    root = translator.output.root_tx
    call = read_call(root.f_code, root.f_locals)
    names: dict[int, list[Argument]] = {}
    for argument, tensor in call.tensors:
        names.setdefault(id(tensor), []).append(argument)
    for node, value in zip(placeholders(gm), inputs, strict=True):
        node.meta["arguments"] = tuple(names.get(id(value), ()))
        own = node.meta["arguments"] and origin_of(node).registered
        if own and not isinstance(value, torch.nn.Parameter):
            # a buffer in the call is state; another tensor there would be the batch
            same: Any = guards.GuardBuilder.ID_MATCH
            guards.install_guard(_source(node).make_guard(same))
    gm.meta["call"] = call._replace(tensors=())  # which must not live on


def _traced_frame() -> Frame:
    """The frame of the compiled function, as the expressions of guards see it."""
    translator: Any = InstructionTranslator.current_tx()
    root = translator.output.root_tx
    names: Any = guards  # what a guard's expression may call
    late = getattr(names, "_get_closure_vars", None)
    scope = {**(late() if late else names.CLOSURE_VARS)}
    scope.update(L=root.f_locals, G=root.f_globals)
    owner = owner_of(root.f_code, root.f_locals)
    outside = [*root.f_code.co_freevars, *filter(None, [owner])]
    return Frame(scope, frozenset(f"L[{name!r}]" for name in outside))


def _source(node: fx.Node) -> Any:
    argument = node.meta.get("grapharg")
    return getattr(argument, "source", None) or getattr(node, "_dynamo_source", None)


def _other_paths() -> dict[str, list[Path]]:
    """Further paths to what Dynamo found before, by the expression of the first.

    It makes one input of a tensor that it meets again, and a guard that it stays one.
    """
    translator: Any = InstructionTranslator.current_tx()
    found: dict[str, list[Path]] = {}
    for guard in translator.output.guards:
        function = getattr(guard.create_fn, "func", None)
        if function is guards.GuardBuilder.DUPLICATE_INPUT:
            first = _path(guard.create_fn.keywords["source_b"])[-1]
            found.setdefault(first, []).append(_path(guard.originating_source))
    return found


def _path(source: Any, name: str = "") -> Path:
    """The expressions that Dynamo reached a value by, the longest last; the name of an
    input that it made itself."""
    names = [] if source else [name]
    while source is not None:
        name = source.name
        names.append(str(name() if callable(name) else name))
        source = getattr(source, "base", None)
    return tuple(reversed(names))


def capture(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """A copy of Dynamo's graph, with what Dynamo forgets after it was compiled."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    result = lazy_module(gm, graph)
    paths = [_path(_source(node), node.name)[-1] for node in placeholders(gm)]
    sources = [
        f"{path} {origin_of(node)}"
        for path, node in zip(paths, placeholders(gm), strict=True)
    ]
    inner = [str(m.graph) for m in gm.modules() if isinstance(m, fx.GraphModule)]
    constants = [str(id(tensor)) for tensor in _constants(gm)]
    translator, scope = InstructionTranslator.current_tx(), _traced_frame().scope
    returns = read_returns(translator, gm, paths, inputs, scope)
    text = "\n".join([*sources, *inner, *constants, str(returns)])
    result.meta.update(call=gm.meta["call"], returns=returns)
    result.meta["text"] = hashlib.sha256(text.encode()).hexdigest()
    return result


def _constants(gm: fx.GraphModule) -> Iterator[Tensor]:
    """Tensors that belong to the graph itself."""
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, str(node.target), None)
        if isinstance(value, Tensor):
            yield value


def graph_break(gm: fx.GraphModule) -> PlanError | None:
    """The error for a graph that holds only a part of the model, if it does.

    Called inside a torch.compile backend. Dynamo runs a function that it cannot break,
    such as one with a break in a loop, in Python, and compiles what that calls.
    """
    reason: Any = gm.compile_subgraph_reason
    if getattr(reason, "graph_break", False):
        return _not_whole(reason.user_stack, reason.reason)
    skipped = _skipped_frame()
    if skipped is None:
        return None
    where = "".join(traceback.format_list([skipped])).strip()
    return PlanError(
        "the model does not trace as one graph; Dynamo leaves this to Python\n"
        f"  {where}\n"
        "fxsched plans whole models: torch.compile(model, backend, fullgraph=True) "
        "tells why it does"
    )


def _of_frame(error: Unsupported) -> PlanError:
    """The error for a frame that Dynamo gives up: the model raised, or breaks it."""
    own = error.__cause__
    if not isinstance(own, ObservedException):
        return _not_whole(error.real_stack, error)
    text = str(own).removeprefix("raised exception ")
    where = list(error.real_stack)[-1]
    return PlanError(f"{where.filename}:{where.lineno}: the model raised {text}")


def _not_whole(
    stack: Sequence[traceback.FrameSummary] | None, reason: object
) -> PlanError:
    """The error for a line of the model that Dynamo can't trace, and why it can't."""
    frames = list(stack or ())
    library = os.path.dirname(traceback.__file__)
    # of what breaks inside Python's own library, the line that calls it
    while len(frames) > 1 and os.path.dirname(frames[-1].filename) == library:
        frames.pop()
    where = "".join(traceback.format_list(frames[-1:])).strip()
    why = str(reason).split("\n")[0]
    return PlanError(
        f"the model does not trace as one graph; it breaks at\n  {where}\n"
        f"  ({why})\n"
        "fxsched plans whole models: rewrite that line with torch operations, or "
        "move it out of the compiled function"
    )


def _skipped_frame() -> traceback.FrameSummary | None:
    """The user's Python frame between torch.compile's call and Dynamo, if any."""
    stack = traceback.extract_stack()
    paths = [frame.filename.replace("\\", "/") for frame in stack]
    dynamo = [i for i, p in enumerate(paths) if p.endswith("/_dynamo/convert_frame.py")]
    calls = [
        i
        for i, p in enumerate(paths)
        if p.endswith("/_dynamo/eval_frame.py") and dynamo and i < dynamo[0]
    ]
    if not calls:
        return None
    torch_folder = os.path.dirname(torch.__file__)
    between = stack[calls[-1] + 1 : dynamo[0]]
    user = [frame for frame in between if not frame.filename.startswith(torch_folder)]
    return user[-1] if user else None


def trace_microbatch(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    batch: Batch,
    specs: Mapping[int, Spec],
    weighted: bool = False,
    outputs: Mapping[int | str, str] | None = None,
) -> fx.GraphModule:
    """A copy of Dynamo's graph for one microbatch, on fake tensors.

    inputs: what the compiled function is called with (real tensors, ints).
    batch: how it is cut.
    specs: the true shapes of inputs whose storage this rank gave up, by index.
    weighted: whether what inputs decide is computed for the whole batch beforehand, by
        `gm.meta["early"]`; its values are inputs after those of the call.
    outputs: what microbatches' values of outputs become, by name, as the user says;
        None, where it doesn't matter.

    Placeholders carry `role`, `name` and `index` (into inputs); every node carries
    `val`, `module`, `work`; facts(gm).outputs says how outputs are put together.
    """
    if is_meta(inputs):
        gm, specs = on_cpu(gm), {**cpu_specs(inputs), **specs}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    weighted = weighted and batch.microbatches > 1
    gm = part_means(gm) if weighted else gm
    binder = _Binder(gm, inputs, batch, mode, specs, outputs)
    if weighted:
        binder.whole = Whole(binder.tracker)
    return binder.bind()


class _Binder:
    """Runs Dynamo's graph once on fake tensors and copies what computes tensors."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        batch: Batch,
        mode: FakeTensorMode,
        specs: Mapping[int, Spec],
        outputs: Mapping[int | str, str] | None,
    ) -> None:
        self.gm, self.inputs, self.batch = gm, inputs, batch
        self.mode, self.specs, self.declared = mode, specs, outputs
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}  # old node -> new node or constant
        self.val: dict[fx.Node, Any] = {}  # old node -> fake value
        self.first: dict[int, fx.Node] = {}  # the input that a tensor of state is
        self.given: set[int] = set()  # storages of inputs and state
        self.kept: set[int] = set()  # storages that autograd keeps for B
        self.backward: dict[str, float] = {}  # seconds, by operation and arguments
        self.interpreter = fx.Interpreter(gm)
        self.tracker = Tracker(batch.rows, batch.symbols)
        self.whole: Whole | None = None
        self.aside: dict[fx.Node, tuple[Any, Tensor]] = {}  # a microbatch's own
        self.seen: Counter[str] = Counter()  # nodes, by module and operation

    def bind(self) -> fx.GraphModule:
        grad = self.training = torch.is_grad_enabled()
        torch.set_grad_enabled(True)  # without gradients too, B decides where to cut
        index = 0
        try:
            for node in self.gm.graph.nodes:
                if node.op == "placeholder":
                    self.placeholder(node, index)
                    index += 1
                elif node.op == "get_attr":
                    self.attribute(node)
                elif node.op == "output":
                    outputs = self.output(node)
                    results: Any = node.args[0]
                else:
                    self.call(node)
        finally:
            torch.set_grad_enabled(grad)
        result = lazy_module(self.gm, self.graph, "Microbatch")
        writes = find_writes(self.graph)
        result.meta[FACTS] = Facts(tuple(outputs), writes, self.mode)
        result.meta["rows"] = [self.rows(old) for old in results]
        result.meta["labels"] = self.tracker.labels
        result.meta["early"] = self.early()
        return result

    def placeholder(self, node: fx.Node, index: int) -> None:
        value = self.inputs[index]
        if not isinstance(value, Tensor):
            self.val[node] = self.new[node] = self.number(node, value)
            if self.whole is not None:
                self.whole.given(node, value)
            return
        name, role = origin_of(node).name, self.role(node, value, index)
        if role is not Role.BATCH:
            same = self.first.setdefault(id(value), node)
            if same is not node:
                self.new[node], self.val[node] = self.new[same], self.val[same]
                return
        new = self.graph.placeholder(re.sub(r"\W+|^(?=\d|self$)", "_", name))
        new.meta.update(role=role, name=name, index=index, module="")
        spec = self.specs.get(index) or Spec.of(value)
        if role is Role.BATCH:
            new.meta["dim"] = dim = self.batch.dims[index]
            shape = list(spec.shape)
            shape[dim] //= self.batch.microbatches
            spec = spec._replace(shape=tuple(shape))
        with self.mode:
            fake = spec.empty().requires_grad_(value.requires_grad)
        self.new[node], self.val[node] = new, fake
        new.meta["val"] = fake
        self.given.add(storage(fake))
        if self.whole is not None and role in (Role.BATCH, Role.SHARED):
            self.whole.given(node, fake)
        if role is Role.BATCH and self.batch.microbatches > 1:
            self.tracker.put(fake, Rows(Kind.APART, self.batch.dims[index]))

    def role(self, node: fx.Node, value: Tensor, index: int) -> Role:
        if index in self.batch.dims:
            name, _, _, also = origin_of(node)
            if also and self.batch.microbatches > 1:
                raise PlanError(
                    f"the argument {name} and {also} are the same tensor: as an "
                    "argument each microbatch gets its part, as what the model holds "
                    f"all of it; pass {name}.clone()"
                )
            return Role.BATCH
        if isinstance(value, torch.nn.Parameter):
            return Role.PARAMETER
        return Role.BUFFER if origin_of(node).registered else Role.SHARED

    def number(self, node: fx.Node, value: Any) -> Any:
        """A size argument: the batch size becomes the microbatch size."""
        size = node.meta.get("example_value")
        return self.batch.size(size, value)

    def attribute(self, node: fx.Node) -> None:
        value = self.gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        new = self.graph.get_attr(str(node.target))
        self.new[node], self.val[node] = new, value
        new.meta["module"] = ""
        if isinstance(value, Tensor):
            self.val[node] = new.meta["val"] = self.mode.from_tensor(value)
            if self.whole is not None and not value.requires_grad:
                self.whole.given(node, self.val[node])

    def call(self, node: fx.Node) -> None:
        leveled = self.whole is not None and self.level(node)
        args = fx.map_arg(node.args, lambda n: self.val[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: self.val[n])
        region = _region(node.target)
        self.tracker.enter(node)
        with self.mode, self.keeping() as held, _Notes(self.tracker) as notes:
            if region:
                target: Any = node.target
                value = target(*args, **kwargs)
            else:
                value = self.run(node, args, kwargs)
        self.val[node] = value
        self.tracker.settle(node, value)
        if leveled:
            self.tracker.put(value, leveled)
        if not (region or notes.written or _holds_tensor(value)):
            self.new[node] = value
            return
        again = {k: node.meta[k] for k in ("recompute",) if k in node.meta}
        if again and any(storage(t) in self.given for t in notes.written):
            raise PlanError(
                f"a buffer is written inside torch.utils.checkpoint{where_of(node)}\n"
                "eager writes it twice, in F and as B computes it again; move what "
                "writes it (such as BatchNorm in training) out of the checkpoint"
            )
        flops, _, seconds = notes.total
        backward = 0.0 if region else self.backward_seconds(node, args, kwargs, value)
        if again and not notes.random:
            backward, held = backward + seconds, []
        new = self.graph.node_copy(node, lambda n: self.new[n])
        new.meta = {
            "val": value,
            "module": node.meta["module"],
            "work": Work(flops, seconds, backward, sum(held)),
            "mutates": tuple(notes.written),
            "learns": tuple(
                notes.written if node.target in INSTANCE_NORMS else notes.learned
            ),
            "random": notes.random,
            "stack_trace": node.meta.get("stack_trace"),
            "key": self.key(node),
            "rows": self.rows(node),
            **again,
        }
        self.new[node] = new
        drawn = notes.random or region
        if self.whole is not None and self.whole.decides(
            node, value, notes.written, drawn
        ):
            self.decided(node, value)

    def run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """What a node gives. Raises PlanError, with its line, for what can't be run."""
        run = getattr(self.interpreter, node.op)
        try:
            return run(node.target, args, kwargs)
        except Exception as error:
            name = getattr(node.target, "__name__", str(node.target))
            why = str(error).split("\n")[0].split(".Hint")[0]
            raise PlanError(
                f"{name} cannot be planned{where_of(node)} ({type(error).__name__}: "
                f"{why}); write it with other torch operations, or compute it outside "
                "the compiled model"
            ) from error

    def level(self, node: fx.Node) -> Rows | None:
        """Before a mean is added to a sum, parts it among the microbatches; the rows
        of what they add up to."""
        rows = [self.rows(operand) for operand in node.args]
        uneven = parts_of_sum(node, rows)
        for i in uneven:
            part: Any = node.args[i]
            if isinstance(part, fx.Node):
                with self.gm.graph.inserting_before(node):
                    args = (part, 1.0 / self.batch.microbatches)
                    whole, part = part, self.gm.graph.call_function(torch.mul, args)
                part.meta.update(whole.meta)
                self.call(part)
            else:
                part = part / self.batch.microbatches
            node.update_arg(i, part)
        cause = first_cause([each for each in rows if each is not None])
        return Rows(Kind.SUM, cause=cause) if uneven else None

    def decided(self, node: fx.Node, value: Tensor) -> None:
        """What reads a value from here on reads an input, computed before the step."""
        assert self.whole is not None
        self.aside[node] = self.new[node], value
        number = len(self.whole.nodes) - 1
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            new = self.graph.placeholder(f"whole_{number}")
        with self.mode:
            fake = Spec.of(value).empty()
        index = len(self.inputs) + number
        new.meta.update(role=Role.SHARED, name=new.name, index=index, module="")
        new.meta["val"] = fake
        self.new[node], self.val[node] = new, fake
        self.given.add(storage(fake))
        self.whole.given(node, fake)

    def early(self) -> Early | None:
        """What computes the inputs that follow those of the call."""
        if self.whole is None or not self.whole.nodes:
            return None
        for node in reversed(self.graph.nodes):
            own = node.op == "call_function" or node.op == "call_method"
            free = own and not node.users and "mutates" in node.meta
            if free and not node.meta["mutates"] and not _region(node.target):
                self.graph.erase_node(node)
        inputs = range(len(self.inputs))
        early = early_values(self.gm, self.whole.nodes, inputs)
        assert early is not None, "inputs alone decide these"
        return early

    def rows(self, node: Any) -> Rows | None:
        """How a node's value depends on the batch, if it is a tensor."""
        value = self.val.get(node) if isinstance(node, fx.Node) else None
        return self.tracker.of(value) if isinstance(value, Tensor) else None

    def key(self, node: fx.Node) -> str:
        """A name that a node keeps in other traces of the model."""
        target = getattr(node.target, "__name__", str(node.target))
        place = f"{node.meta['module']}:{target}"
        self.seen[place] += 1
        return f"{place}:{self.seen[place]}"

    @contextmanager
    def keeping(self) -> Iterator[list[int]]:
        """Notes the bytes that autograd keeps for B, each storage once."""
        found: list[int] = []
        kept, given = self.kept, self.given  # alone: what is saved keeps the hook

        def note(tensor: Tensor) -> Tensor:
            where = storage(tensor)
            if where not in kept and where not in given:
                kept.add(where)
                found.append(tensor.untyped_storage().nbytes())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield found

    def backward_seconds(
        self, node: fx.Node, args: Any, kwargs: Any, value: Any
    ) -> float:
        """Seconds of a node's B; as long as those of an equal node."""
        given = [*args, *kwargs.values()]
        shapes = [
            (Spec.of(t), t.requires_grad) for g in (given, value) for t in tensors(g)
        ]
        plain = fx.map_arg(
            (node.args, node.kwargs),
            lambda n: None if _holds_tensor(self.val[n]) else self.val[n],
        )
        key = f"{node.op} {node.target} {id(node.target)} {shapes} {plain}"
        if key not in self.backward:
            with self.mode:
                (again, named), leaves = alone((args, tuple(kwargs.values())))
                run = getattr(self.interpreter, node.op)
                made = run(node.target, again, dict(zip(kwargs, named, strict=True)))
                backward = backward_of(made, leaves)
                with Meter() as meter:
                    backward()
            self.backward[key] = meter.total.seconds
        return self.backward[key]

    def output(self, node: fx.Node) -> list[Output]:
        assert isinstance(node.args[0], (tuple, list))
        given: list[Any] = list(node.args[0])
        for old in self.aside.keys() & set(given):  # outputs are put together
            self.new[old], self.val[old] = self.aside[old]
        new = [self.new[old] if isinstance(old, fx.Node) else old for old in given]
        self.written = self.storages_written()
        self.keep_written()
        states = [self.state_of(*each) for each in zip(count(), given, new)]
        self.written = self.storages_written()
        self.origins: dict[fx.Node, frozenset[str]] | None = None
        found: dict[int, Found] = {}
        outputs = [
            state or self.describe(i, old, made, found)
            for i, (state, old, made) in enumerate(zip(states, given, new, strict=True))
        ]
        self.graph.output(tuple(map(_result, outputs, new)))
        if self.declared is None or self.batch.microbatches == 1:
            return outputs
        return decide(outputs, found)

    def keep_written(self) -> None:
        """Other tensors of the model that it writes into are kept like buffers."""
        for node in placeholders(self.gm):
            new = self.new[node]
            if isinstance(new, fx.Node) and new.meta["role"] is Role.SHARED:
                mine = storage(new.meta["val"]) in self.written
                if mine and not origin_of(node).argument:
                    new.meta["role"] = Role.BUFFER

    def storages_written(self) -> set[int]:
        nodes = self.graph.nodes
        return {storage(t) for n in nodes for t in n.meta.get("mutates", ())}

    def state_of(self, position: int, old: Any, new: Any) -> Output | None:
        """The output that is state after the step: a buffer that the model writes
        into and returns, or a new tensor in the place of an old one."""
        if not isinstance(new, fx.Node) or not isinstance(self.val[old], Tensor):
            return None
        fake, returned = self.val[old], self.gm.meta["returns"][position]
        given = {
            i: state
            for i, node in enumerate(placeholders(self.gm))
            if isinstance(state := self.new[node], fx.Node)
            and state.meta["role"] is not Role.BATCH
        }
        if storage(fake) in self.written:
            for state in given.values():
                value = state.meta["val"]
                same = storage(value) == storage(fake)
                if same and Spec.of(value) == Spec.of(fake):
                    return Output("state", state=state.meta["index"])
        replaced = [given[i] for i in returned.replaces if i in given]
        if not replaced or self.batch.microbatches == 1:
            return None
        for state in replaced:
            self.replace(state, old, returned)
        return Output("state", state=replaced[0].meta["index"], replaced=True)

    def replace(self, state: fx.Node, old: fx.Node, returned: Returned) -> None:
        """Writes a new value for an attribute into what it was, for later microbatches.

        before: add = n + 1; return add        # self.n = self.n + 1
        after:  add = n + 1; n.copy_(add); return None
        """
        before, after = state.meta["val"], self.val[old]
        line = user_line(old.meta.get("stack_trace"))
        where = f"{state.meta['name']} gets a new value, at\n  {line}\n"
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise PlanError(
                f"{where}which is {Spec.of(after)} and was {Spec.of(before)}; what the "
                "model keeps between microbatches must keep its shape and type, and "
                "have no dimension that is the batch"
            )
        if state.meta["role"] is Role.PARAMETER or before.requires_grad:
            raise PlanError(f"{where}but it is trained; keep what F writes in buffers")
        if after.requires_grad and self.training:
            raise PlanError(
                f"{where}and gradients would flow through it into the microbatch "
                "before; detach it: assign new_value.detach()"
            )
        state.meta["role"] = Role.BUFFER
        placeholder = next(n for n, new in self.new.items() if new is state)
        value = self.step("detach", old) if after.requires_grad else old
        self.step("copy_", placeholder, value, like=old)

    def step(self, method: str, *args: fx.Node, like: fx.Node | None = None) -> fx.Node:
        """Another operation on values of Dynamo's graph, at the place of `like`."""
        node = fx.Graph().call_method(method, args)
        where = ("stack_trace", "module")
        meta = (like or args[0]).meta
        node.meta = {k: v for k, v in meta.items() if k in where}
        self.call(node)
        node.args = ()  # Dynamo's graph knows nothing of it
        return node

    def describe(
        self, position: int, old: Any, new: Any, known: dict[int, Found]
    ) -> Output:
        """How the microbatches' values of one output become what the user gets."""
        returned: Returned = self.gm.meta["returns"][position]
        name = returned.label
        if name is None:
            name = plain(returned.stored[0]) if returned.stored else position
        if not isinstance(new, fx.Node):
            return Output(
                "constant", constant=self.whole_size(name, old, new), name=name
            )
        if new.op == "get_attr":
            tensor = getattr(self.gm, str(new.target))
            return Output("constant", constant=tensor, name=name)
        if new.op == "placeholder" and new.meta["role"] is Role.SHARED:
            return Output("given", state=new.meta["index"], name=name)
        fake = self.val[old]
        if self.batch.microbatches == 1:
            scalar = fake.dim() == 0 and fake.is_floating_point()
            kind, gradient = "scalar" if scalar else "whole", fake.requires_grad
            return Output(kind, differentiable=gradient, name=name)
        known[position] = Found(
            name,
            returned.label is not None,
            fake,
            old.meta["example_value"].shape,
            self.origins_of(old),
            self.rows(old),
            str(user_line(old.meta.get("stack_trace"))),
        )
        how = (self.declared or {}).get(name)
        return describe(known[position], self.batch, how)

    def whole_size(self, name: int | str, old: Any, new: Any) -> Any:
        """A size that is returned, for the whole batch."""
        value = getattr(old, "meta", {}).get("example_value")
        if not self.batch.changes(value):
            return new
        size = self.batch.whole(value)
        if size is None:
            raise PlanError(
                f"output {name!r} is a size that depends on the batch; return tensors, "
                "and take sizes from them afterwards"
            )
        return size

    def origins_of(self, old: fx.Node) -> frozenset[str]:
        """What a value comes of; computed for all, once it is asked for."""
        if self.origins is None:
            nodes = [n for n in self.gm.graph.nodes if n.op != "output"]
            own = {n: origin for n in nodes if (origin := self.origin(n)) is not None}
            mutates = {
                n: new.meta.get("mutates", ())
                for n, new in self.new.items()
                if isinstance(new, fx.Node)
            }
            self.origins = origins_of(
                nodes, own, self.val, lambda n: mutates.get(n, ())
            )
        return self.origins[old]

    def origin(self, node: fx.Node) -> str | None:
        """What a value comes of that no other value gave it."""
        new = self.new[node]
        if node.op != "placeholder":
            drawn = isinstance(new, fx.Node) and new.meta.get("random")
            return "random" if drawn else None
        if not isinstance(new, fx.Node):
            size = node.meta.get("example_value")
            return "batch" if self.batch.changes(size) else None
        if new.meta["role"] is Role.BATCH:
            return "batch"
        return "state" if storage(new.meta["val"]) in self.written else None


def _result(output: Output, new: Any) -> Any:
    """What the graph of a microbatch returns for an output."""
    if output.kind == "constant":
        return None if isinstance(output.constant, Tensor) else output.constant
    return None if output.kind in ("state", "given") else new


def _region(target: object) -> bool:
    return target in REGION_ENTERS or target in REGION_EXITS


BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
INSTANCE_NORMS = (torch.instance_norm, torch.nn.functional.instance_norm)


class _Notes(Meter):  # type: ignore[no-untyped-call]
    """Notes the tensors that operations write into too."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.written: list[Tensor] = []
        self.tracker = tracker
        self.learned: list[Tensor] = []  # of these, running statistics

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for position, name in _written(func):
            self.written += tensors(args[position : position + 1])
            self.written += tensors((kwargs or {}).get(name))
        # their schemas do not say that running statistics are written in training
        if func._schema.name.removeprefix("aten::") in BATCH_NORMS and args[5]:
            self.learned += [*tensors(args[3]), *tensors(args[4])]
            self.written += self.learned
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.tracker.see(func, args, kwargs or {}, out)
        return out


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes into."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _holds_tensor(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, Tensor)
