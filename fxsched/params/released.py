"""What a rank holds in the place of a parameter or buffer that others keep.

A parameter that a rank doesn't keep is one NaN there, expanded to its shape. It refuses
to be copied, saved or loaded: torch.save(model.state_dict()) and copy.deepcopy(model)
are errors that say what to call instead. So is a backward() that brings it a gradient
from outside of the model. Methods that change it in place, as a layer's
reset_parameters() does, leave that to the ranks that keep it, and draw the same random
numbers. All this holds as well for a copy that is behind, of a parameter that the
user's loop steps on one rank alone, where the schedule's u says so. A call of a module
that has one of these, outside of the compiled model, is an error too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.weak import TensorWeakRef

from ..ir.graphs import Spec
from ..jobs.job import PlanError
from ..torch_compat.compiled_modules import active_modes
from ..transport.processes import tell_all
from .intercepted import CHANGES, FILLS, READS, WRITES, intercept, let_through
from .record import note, record_of, spec_of


def give_up(name: str, tensor: Tensor, values: bool = True) -> None:
    """Makes a parameter or buffer refuse to be read.

    values: whether to let go of them too; those of a buffer, or of a copy that another
        rank updates, are out of date here.
    """
    record = record_of(tensor)
    if values:
        release_memory(tensor, spec_of(tensor))
    what = f"no values of {name}, which rank {record.owners[0]} keeps"
    if record.behind and not values:
        what = f"old values of {name}, the newest are on rank {record.updater}"
    refuse(tensor, what)


def release_memory(tensor: Tensor, spec: Spec) -> None:
    """Leaves a tensor one NaN, expanded to its shape."""
    tensor.data = torch.full((), torch.nan).to(tensor).expand(spec.shape)


def stay_released(tensor: Tensor) -> None:
    """Lets go of the memory that .to(), or the user, gave a tensor that others keep."""
    if any(tensor.stride()):
        release_memory(tensor, spec_of(tensor))


def refuse(tensor: Tensor, what: str) -> None:
    """Makes a tensor refuse to be read and loaded, and to get a gradient from outside
    of the model; leaves to its owners what changes it in place.

    what: this rank has instead of its values.
    """
    hooked = note(tensor, lacks=what).hooked
    intercept(tensor, READS + WRITES, _refuse)
    if not isinstance(tensor, nn.Parameter):
        return  # a buffer has no gradient, and each rank may write its own
    intercept(tensor, FILLS + CHANGES, _leave_to_owners)
    if not hooked:
        note(tensor, hooked=True)
        trained = tensor.requires_grad
        tensor.requires_grad_().register_hook(  # type: ignore[no-untyped-call]
            partial(_refuse_gradient, TensorWeakRef(tensor))
        )
        tensor.requires_grad_(trained)


def refuse_calls(model: nn.Module) -> None:
    """Makes modules in a model refuse calls that read tensors this rank gave up.

    Called before the model is traced: to Dynamo, a hook that comes later makes another
    model. What it compiles has no hooks of modules, and so has a trace of torch.export.
    """
    for module in model.modules():
        owns = any(True for _ in _own_tensors(module))
        hooks = module._forward_pre_hooks.values()
        if owns and module is not model and _refuse_call not in hooks:
            module.register_forward_pre_hook(_refuse_call, prepend=True)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _refuse_call(module: nn.Module, args: object) -> None:
    if torch.compiler.is_compiling():
        return
    for tensor in _own_tensors(module):
        lacks = record_of(tensor).lacks
        modes = active_modes() if lacks else ()
        if lacks and not any(isinstance(mode, FakeTensorMode) for mode in modes):
            raise PlanError(
                f"this rank has {lacks}; call the compiled model, on every rank, or "
                "load fxsched.full_state_dict(model), called on every rank, into "
                "another copy of the model"
            )


def take_back(tensor: Tensor) -> None:
    """Ends the refusals of a tensor, which has its newest values."""
    if is_given_up(tensor):
        note(tensor, lacks=None)
        let_through(tensor)


def has_hooks(tensor: Tensor) -> bool:
    """Whether a user has put hooks on a tensor's gradient."""
    hooked: Any = tensor
    before = (hooked._backward_hooks or {}).values()
    own = (getattr(hook, "func", None) is _refuse_gradient for hook in before)
    return bool(hooked._post_accumulate_grad_hooks) or not all(own)


def is_given_up(tensor: Tensor) -> bool:
    """Whether this rank has given a tensor up to its owners, or to its updater."""
    return record_of(tensor).lacks is not None


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has values, be they out of date, and isn't one NaN."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def stand_in(value: Any) -> Any:
    """Some values of the same shape for what this rank gave up, or hasn't made yet, to
    be timed with."""
    if not isinstance(value, Tensor):
        return value
    record = record_of(value)
    if record.lacks is None and record.lazy is None:
        return value
    return spec_of(value).empty().fill_(0.01).requires_grad_(value.requires_grad)


def _refuse(tensor: Tensor, method: str, *args: Any, **kwargs: Any) -> Any:
    remedy = (
        "load with fxsched.load_full_state_dict(model, state)"
        if method in WRITES
        else "save fxsched.full_state_dict(model)"
    )
    lacks = record_of(tensor).lacks
    raise PlanError(f"this rank has {lacks}; {remedy}, called on every rank")


def _leave_to_owners(tensor: Tensor, method: str, *args: Any, **kwargs: Any) -> Tensor:
    """Changes nothing here, and draws as many random numbers."""
    if method in FILLS:
        getattr(spec_of(tensor).empty(), method)(*args, **kwargs)
    return tensor


def _refuse_gradient(reference: TensorWeakRef, gradient: Tensor) -> None:
    tensor = reference()
    what = None if tensor is None else record_of(tensor).lacks
    if what is not None:
        error = PlanError(
            f"the loss has a term outside of the model, but this rank has {what}; add "
            "fxsched.parameter_sum(model, function), called on every rank, or compute "
            "it in the model"
        )
        tell_all(error)
        raise error


@contextmanager
def exchanged(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Puts values in place of what this rank holds of some tensors, for a while."""
    before = [(t.data, record_of(t).lacks, dict(vars(t))) for t in tensors]
    try:
        for tensor, value in zip(tensors, values, strict=True):
            take_back(tensor)
            tensor.data = value
        yield
    finally:
        for tensor, (data, lacks, attributes) in zip(tensors, before, strict=True):
            tensor.data = data
            if lacks is not None:
                note(tensor, lacks=lacks)
                vars(tensor).update(attributes)
