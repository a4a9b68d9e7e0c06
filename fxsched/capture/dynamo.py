"""All that fxsched asks of Dynamo.

It asks for a symbolic batch size as Dynamo compiles a frame for fxsched, and writes
down what is known of a graph only while Dynamo is at it. returns.py reads some of the
records that are handed to it here; torch_compat has what stands around Dynamo's own
functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_tb
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.guards as guards
from torch import fx, nn
from torch._dynamo.exc import (
    InternalTorchDynamoError,
    ObservedException,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.symbolic_convert import InstructionTranslator

from ..ir.meta import note, of_node
from ..ir.request import Request
from ..jobs.job import PlanError
from ..torch_compat.compiled_modules import export_broken, innermost
from ..torch_compat.ctc_losses import ctc_traced
from ..torch_compat.frames import around_frames, forget, settings
from .caller import Call, owner_of, read_call
from .graph_breaks import GraphBreak, not_whole, own_frame
from .graph_inputs import Origins, Path, placeholders, plain
from .returns import read_returns
from .samples import symbolic_dim

BREAKS = (Unsupported, UserError, InternalTorchDynamoError)  # of a model's line


def configure_dynamo() -> None:
    """Makes Dynamo compile for fxsched's backends with the settings they need, and
    torch.compile's modules that it breaks go on by torch.export. Its own settings, and
    those of other backends, stay as they are."""
    export_broken(GraphBreak, lambda backend: _request_of(backend) is not None)
    around_frames(_compiled)


def _request_of(backend: Any) -> Request | None:
    """That of a backend of ours."""
    request = getattr(backend, "request", None)
    return request if isinstance(request, Request) else None


def _compiled(arguments: dict[str, Any]) -> AbstractContextManager[None] | None:
    """What a frame of ours is compiled in."""
    backend = _own_backend(arguments["compiler_fn"])
    request = _request_of(backend)
    if request is None:
        return None
    backend.accept(arguments["locals"].values())
    arguments["one_graph"] = True  # a part of a model has no plan
    forget(lambda wrapper: innermost(wrapper) is backend)
    backend.serve(arguments["compiler_fn"])
    _mark_sizes(read_call(arguments["code"], arguments["locals"]), request)
    return _tracing(backend)


@contextmanager
def _tracing(backend: Any) -> Iterator[None]:
    with settings(), ctc_traced(), backend.tracing():
        try:
            yield
        except TorchRuntimeError as error:
            raise _failed(error) from error
        except BREAKS as error:  # Dynamo would run the frame without a word
            raise _frame_error(error) from error


def _own_backend(compiler: Any) -> Any:
    """The innermost backend; where torch.compile was given the name "fxsched", one that
    is made for this call of it alone, and takes the name's place there.

    Else models of one class would share it: Dynamo takes wrappers of equal backends
    with equal options for the same.
    """
    backend = innermost(compiler)
    make = getattr(backend, "from_compile", None)
    if make is None:
        return backend
    wrapper = compiler
    while (inner := getattr(wrapper, "__wrapped__", None)) is not None:
        wrapper = inner
    wrapper.compiler_fn = made = make(wrapper.kwargs)
    wrapper.kwargs = {}
    return made


def _mark_sizes(call: Call, request: Request) -> None:
    """Asks for symbolic sizes where arguments have their samples."""
    for argument, tensor in call.tensors:
        dim = symbolic_dim(argument, tensor, request)
        if dim is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def note_call(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Writes down what Dynamo forgets of its graph: where inputs come from, as
    meta["origin"], what the caller calls them, as meta["arguments"], which modules
    nodes are called in, as meta["module"]; all that the caller may name, as
    gm.meta["call"], and where outputs go, as gm.meta["returns"].

    Called inside a torch.compile backend.
    """
    translator: Any = InstructionTranslator.current_tx()
    root = translator.output.root_tx
    scope = _scope(root)
    owner = owner_of(root.f_code, root.f_locals)
    outside = {f"L[{name!r}]" for name in (*root.f_code.co_freevars, owner)}
    others = _other_paths(translator.output.guards)
    paths = [_path(_source(node), node.name) for node in placeholders(gm)]
    ways = [[path, *others.get(path[-1], ())] for path in paths]
    origins = Origins(scope, outside, ways, inputs)
    for node in gm.graph.nodes:
        of_node(node)["module"] = origins.module_name(
            node.meta.get("nn_module_stack", {})
        )
    call = read_call(root.f_code, root.f_locals)
    for i, node in enumerate(placeholders(gm)):
        names = tuple(each for each, tensor in call.tensors if tensor is inputs[i])
        origin = origins.inputs[i]
        note(node, origin=origin, arguments=names)
        if origin.registered and names and not isinstance(inputs[i], nn.Parameter):
            # a buffer in the call is state; another tensor there would be the batch
            same: Any = guards.GuardBuilder.ID_MATCH
            guards.install_guard(_source(node).make_guard(same))
        if paths[i][-1].endswith(".storage_offset()") and not node.users:
            # where in its memory a batch begins, which Dynamo asks for if that changes
            # (`for x in data`) and nothing reads: each batch would be another plan
            of_node(node)["origin"] = None
    gm.meta["call"] = call._replace(tensors=())  # which must not live on
    ends = [path[-1] for path in paths]
    gm.meta["returns"] = read_returns(translator, gm, ends, inputs, scope)


def _scope(root: Any) -> dict[str, Any]:
    """What the expressions of guards may name, for the function that is compiled."""
    names: Any = guards  # what a guard's expression may call
    late = getattr(names, "_get_closure_vars", None)
    known = late() if late else names.CLOSURE_VARS
    return {**known, "L": root.f_locals, "G": root.f_globals}


def _source(node: fx.Node) -> Any:
    argument = node.meta.get("grapharg")
    return getattr(argument, "source", None) or getattr(node, "_dynamo_source", None)


def _other_paths(known: Iterable[Any]) -> dict[str, list[Path]]:
    """Further paths to what Dynamo found before, by the expression of the first.

    It makes one input of a tensor that it meets again, and a guard that it stays one.
    """
    others: dict[str, list[Path]] = {}
    for guard in known:
        function = getattr(guard.create_fn, "func", None)
        if function is guards.GuardBuilder.DUPLICATE_INPUT:
            first = _path(guard.create_fn.keywords["source_b"])[-1]
            others.setdefault(first, []).append(_path(guard.originating_source))
    return others


def _path(source: Any, name: str = "") -> Path:
    """The expressions that Dynamo reached a value by, the longest last; the name of an
    input that it made itself."""
    names = [] if source else [name]
    while source is not None:
        name = source.name
        names.append(str(name() if callable(name) else name))
        source = getattr(source, "base", None)
    return tuple(reversed(names))


def _frame_error(error: TorchDynamoException) -> PlanError:
    """The error for a frame that Dynamo gives up: the model raised, or breaks it."""
    raised = error.__cause__
    stack = list(getattr(error, "real_stack", None) or ())
    if not isinstance(raised, ObservedException):
        return not_whole(stack, error)
    text = str(raised).removeprefix("raised exception ")
    # before 2.12 Dynamo names its own variable, which says the class alone
    text = re.sub(r"ExceptionVariable\(<class '([\w.]+)'>\)", r"\1", text)
    # of a key that a dict lacks, it names the key alone
    kind = type(raised).__name__.removeprefix("Observed")
    text = re.sub(r"^[^'\"]*ConstantVariable\(\w+: (.*?)\)+$", rf"{kind}: \1", text)
    where = f"{stack[-1].filename}:{stack[-1].lineno}"
    return PlanError(f"{where}: the model raised {text}")


def _failed(error: TorchRuntimeError) -> PlanError:
    """The error for an operation that fails on the shapes and types that it gets."""
    frame = own_frame(error.real_stack)
    # Dynamo tells the operation's own error in the middle of advice
    found = re.search(r"""got (\w+)\((['"])(.*?)\2\)""", error.msg, re.S)
    text = f"{found[1]}: {found[3]}" if found else error.msg.partition("\n")[0]
    sizes = re.findall(r"\bs\d+\b", text)
    note = f" ({sizes[0]}: a size that may change, as the batch's)" if sizes else ""
    where = f"{frame.filename}:{frame.lineno}{_module_of(error)}"
    if "its data is not allocated yet" in text:
        return PlanError(
            f"{where}: PyTorch can't trace this line, which reads values of tensors; "
            "if it indexes with tuples of tensors, such as x[rows, columns], give one "
            "tensor for each dimension, such as x[index[:, 0], index[:, 1]]"
        )
    return PlanError(f"{where}: the model raised {text}{note}")


def _module_of(error: TorchRuntimeError) -> str:
    """The innermost module in which an operation failed, which Dynamo's frames know."""
    nodes = [frame.f_locals.get("node") for frame, _ in walk_tb(error.__traceback__)]
    stacks = [n.meta.get("nn_module_stack") for n in nodes if isinstance(n, fx.Node)]
    if not stacks or not stacks[-1]:
        return ""
    path, _ = [*stacks[-1].values()][-1]
    return f", in {plain(str(path)).removeprefix('self.')}"
