"""deferred(): builds models whose parameters take no memory before the first call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from ..ir.graphs import Spec
from ..jobs.job import PlanError
from .full_state import module_of
from .lazy import forget, leave_unmade, make
from .record import Lazy
from .recording import Peeks, Recording, is_gone

BUILDING: list[Recording] = []  # what goes on now


@contextmanager
def deferred(draws: bool = True) -> Iterator[None]:
    """Builds models without memory: `with fxsched.deferred(): model = Model(..)`.

    The parameters and buffers that modules register get their values at the model's
    first call. Each rank makes those that it keeps. Values and random generators have
    the same bits as after an ordinary build. Before the first call, copying or saving a
    parameter makes its values, load_weights and load take effect at the first call, and
    computing with a parameter gives NaN. In one process, all values are made at the
    first call, or by materialize(model).

    draws: False if every random value will be loaded. Then no random numbers are drawn,
        and the random generators don't change. Using a value that was not loaded raises
        PlanError.

    Small tensors that aren't random are made at once. Tensors of integers, tensors that
    no module registers, and tensors whose memory something else (such as NumPy) uses
    are made by the end of the block. Constructors must run on the CPU. Raises PlanError
    for an operation that can't be deferred.
    """
    recording = Recording(draws)
    if BUILDING:
        raise PlanError(
            "deferred() in deferred(): one around all of it is enough; leave the "
            "inner one out"
        )
    modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def note(module: nn.Module, name: str, registered: Any) -> None:
        modules.add(module)
        if isinstance(registered, nn.Module):  # maybe a copy, which registered nothing
            modules.update(registered.modules())

    hooks = [
        register_module_parameter_registration_hook(note),
        register_module_buffer_registration_hook(note),
        register_module_module_registration_hook(note),
    ]
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # it would take the memory
    BUILDING.append(recording)
    try:
        with recording, Peeks(recording):
            yield
    finally:
        BUILDING.remove(recording)
        settings.fill_uninitialized_memory = filled
        for hook in hooks:
            hook.remove()
        _put_off(recording, modules)


def materialize(model: nn.Module) -> None:
    """Makes all values of a model that was built in deferred(), in this process.

    Raises PlanError for parameters that were to be loaded and have not been.
    """
    module = module_of(model)
    for tensor in (*module.parameters(), *module.buffers()):
        make(tensor)


def _put_off(recording: Recording, modules: Iterable[nn.Module]) -> None:
    """Takes the memory of modules' tensors; fills what something else holds."""
    tensors = {
        id(tensor): tensor
        for module in modules
        for tensor in (*module.parameters(False), *module.buffers(False))
        if tensor.is_cpu and not is_lazy(tensor)
    }
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        by_storage.setdefault(recording.number(tensor), []).append(tensor)
    for number, reference in recording.alive().items():
        its = by_storage.get(number, [])
        if len(its) == 1 and _says_nan(its[0]):
            tensor, spec, place = its[0], Spec.of(its[0]), recording.place(its[0])
            values = partial(recording.tape.values, place)
            leave_unmade(tensor, Lazy(spec, values))
            if is_gone(reference):
                continue
            forget(tensor)  # a view of it, or the like, is elsewhere
            tensor.data = place.of({number: recording.storage(reference)})
        recording.fill(number, recording.storage(reference))


def _says_nan(tensor: Tensor) -> bool:
    """Whether a tensor can do without its values until a rank keeps it: whole numbers
    that are used too early couldn't be told from others."""
    real = tensor.is_floating_point() or tensor.is_complex()
    return real and tensor.numel() > 1 and not tensor.is_inference()
