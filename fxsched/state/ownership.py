"""Which ranks keep a parameter or buffer, and what the others hold in its place.

A parameter that a rank doesn't keep is one NaN there, expanded to its shape. It refuses
to be copied, saved or loaded: torch.save(model.state_dict()) and copy.deepcopy(model)
are errors that say what to call instead. So is a backward() that brings it a gradient
from outside of the model. Methods that change it in place, as a layer's
reset_parameters() does, leave that to the ranks that keep it, and draw the same random
numbers. All this holds as well for a copy that is behind, of a parameter that the
user's loop steps on one rank alone, where the schedule's u says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ..ir.graphs import Spec
from ..jobs.job import PlanError
from ..transport.processes import tell_all
from .unmade import READS, UNMADE, WRITES

FILLS = (
    *("uniform_", "normal_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"),
    *("geometric_", "random_", "zero_", "fill_"),
)
CHANGES = (
    *("add_", "sub_", "mul_", "div_", "neg_", "pow_", "lerp_", "addcmul_", "addcdiv_"),
    *("clamp_", "clamp_min_", "clamp_max_", "erfinv_"),
)
LACKS = "_fxsched_lacks"  # the attribute that says what a rank has instead


class Ownership(NamedTuple):
    """Which workers keep a parameter or buffer, and its shape and strides.

    updater: the worker that updates it, if u says.
    behind: whether the other owners' copies are renewed in the next call alone, and not
        when it is updated.
    """

    owners: tuple[int, ...]
    spec: Spec
    updater: int | None = None
    behind: bool = False

    @property
    def updaters(self) -> tuple[int, ...]:
        """The workers that update it, and keep the optimizer's state of it."""
        return self.owners if self.updater is None else (self.updater,)

    @property
    def newest(self) -> tuple[int, ...]:
        """The workers that have its newest values between calls."""
        return self.updaters if self.behind else self.owners


# of all models of this process: a model may have several backends, one after another
OWNERSHIPS: MutableMapping[Tensor, Ownership] = WeakIdKeyDictionary()
_HOOKED: MutableMapping[Tensor, None] = WeakIdKeyDictionary()


def give_up(name: str, tensor: Tensor, values: bool = True) -> None:
    """Makes a parameter or buffer refuse: its attributes shadow torch's methods.

    values: whether to let go of them too; those of a buffer, or of a copy that another
        rank updates, are out of date here.
    """
    entry = OWNERSHIPS[tensor]
    if values:
        tensor.data = nothing(tensor).expand(entry.spec.shape)
    what = f"no values of {name}, which rank {entry.owners[0]} keeps"
    if entry.behind and not values:
        what = f"old values of {name}, the newest are on rank {entry.updater}"
    refuse(tensor, what)


def nothing(tensor: Tensor) -> Tensor:
    """One NaN, for a tensor that lets go of its values."""
    return torch.full((), torch.nan).to(tensor)


def refuse(tensor: Tensor, what: str) -> None:
    """Makes a tensor refuse to be read and loaded, and to get a gradient from outside
    of the model; leaves to its owners what changes it in place.

    what: this rank has instead of its values.
    """
    setattr(tensor, LACKS, what)
    for method in READS + WRITES:
        setattr(tensor, method, MethodType(_refusal(what, method), tensor))
    if not isinstance(tensor, nn.Parameter):
        return  # a buffer has no gradient, and each rank may write its own
    for method in FILLS + CHANGES:
        setattr(tensor, method, MethodType(_left_to_owners(method), tensor))
    if tensor not in _HOOKED:
        _HOOKED[tensor] = None
        trained = tensor.requires_grad
        tensor.requires_grad_().register_hook(  # type: ignore[no-untyped-call]
            partial(_refuse_gradient, TensorWeakRef(tensor))
        )
        tensor.requires_grad_(trained)


def take_back(tensor: Tensor) -> None:
    """Ends the refusals of a tensor, which has its newest values."""
    for name in (LACKS, *READS, *WRITES, *FILLS, *CHANGES):
        vars(tensor).pop(name, None)


def has_hooks(tensor: Tensor) -> bool:
    """Whether a user has put hooks on a tensor's gradient."""
    hooked: Any = tensor
    before = (hooked._backward_hooks or {}).values()
    own = (getattr(hook, "func", None) is _refuse_gradient for hook in before)
    return bool(hooked._post_accumulate_grad_hooks) or not all(own)


def is_given_up(tensor: Tensor) -> bool:
    """Whether this rank has given a tensor up to its owners, or to its updater."""
    return LACKS in vars(tensor)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has values, be they out of date, and isn't one NaN."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def first_owner(tensor: Tensor) -> int:
    """The rank that speaks for a tensor: the one that updates it, or its first owner;
    rank 0 for one that no program reads."""
    return OWNERSHIPS[tensor].updaters[0] if tensor in OWNERSHIPS else 0


def newest_owner(tensor: Tensor) -> int:
    """The first rank that has a tensor's newest values; rank 0 for one that no program
    reads."""
    return OWNERSHIPS[tensor].newest[0] if tensor in OWNERSHIPS else 0


def is_updated(tensor: Tensor, rank: int) -> bool:
    """Whether a rank updates a parameter; each those that no program reads."""
    return tensor not in OWNERSHIPS or rank in OWNERSHIPS[tensor].updaters


def is_updated_by_all(tensor: Tensor, workers: int) -> bool:
    """Whether each of so many ranks updates a parameter."""
    return tensor not in OWNERSHIPS or len(OWNERSHIPS[tensor].updaters) >= workers


def spec_of(tensor: Tensor) -> Spec:
    """What a tensor is where it is kept, or will be once it is made."""
    entry = UNMADE.get(tensor) or OWNERSHIPS.get(tensor)
    if entry is None:
        return Spec.of(tensor)
    return entry.spec._replace(dtype=tensor.dtype, device=tensor.device)


def specs_of(values: Sequence[Any]) -> dict[int, Spec]:
    """What tensors among some values, that may be otherwise here, are where they are
    kept, by position."""
    return {
        i: spec_of(value)
        for i, value in enumerate(values)
        if isinstance(value, Tensor) and (value in OWNERSHIPS or value in UNMADE)
    }


def stand_in(value: Any) -> Any:
    """Some values of the same shape for what this rank gave up, or hasn't made yet, to
    be timed with."""
    if not isinstance(value, Tensor) or READS[0] not in vars(value):
        return value
    some = specs_of([value])[0].empty().fill_(0.01)
    return some.requires_grad_(value.requires_grad)


def _refusal(what: str, method: str) -> Callable[..., Any]:
    """what: this rank has instead of the tensor's values."""
    real = getattr(Tensor, method)
    remedy = (
        "load with fxsched.load_full_state_dict(model, state)"
        if method in WRITES
        else "save fxsched.full_state_dict(model)"
    )

    def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a trace reads no values
            return real(tensor, *args, **kwargs)
        raise PlanError(f"this rank has {what}; {remedy}, called on every rank")

    return refuse


def _left_to_owners(method: str) -> Callable[..., Any]:
    """What changes a tensor on the ranks that keep it, and here draws as many random
    numbers."""
    real = getattr(Tensor, method)

    def leave(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return real(tensor, *args, **kwargs)
        if method in FILLS:
            real(spec_of(tensor).empty(), *args, **kwargs)
        return tensor

    return leave


def _refuse_gradient(reference: TensorWeakRef, gradient: Tensor) -> None:
    tensor = reference()
    what = None if tensor is None else vars(tensor).get(LACKS)
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
    before = [(tensor.data, dict(vars(tensor))) for tensor in tensors]
    try:
        for tensor, value in zip(tensors, values, strict=True):
            take_back(tensor)
            tensor.data = value
        yield
    finally:
        for tensor, (data, attributes) in zip(tensors, before, strict=True):
            tensor.data = data
            vars(tensor).update(attributes)
