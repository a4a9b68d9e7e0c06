"""The whole state of a model or an optimizer, from and to the ranks that keep it.

States are as plain PyTorch saves them. Every rank must call each function. A process
that has everything (threads, or no fxsched) does not communicate.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ir.graphs import Spec, storage
from ..jobs.job import PlanError
from ..transport.checksums import digest
from ..transport.processes import Processes, everyone
from .cut_weights import follow_cast, put
from .optimizer_steps import cut_state, unguarded, updated_elsewhere
from .optimizers import parameters_of
from .record import are_placed, joined, piece, pieces_of, record_of, spec_of
from .released import exchanged, is_given_up


def full_state_dict(model: nn.Module, rank: int | None = None) -> dict[str, Any]:
    """Returns model.state_dict() as in plain PyTorch, in copies on the CPU.

    model: the model, compiled or not; names are those of the module itself.
    rank: the only rank that gets the state; other ranks get {}. None: all ranks get it.

    Every rank must call it. If no rank has memory for the whole state, use
    stream_state_dict. Raises PlanError if another rank calls another function.
    """
    module = module_of(model)
    tensors = _kept(module)
    elsewhere: dict[Tensor, Tensor] = {}
    if tensors:
        processes = everyone("full_state_dict")
        processes.agree(f"full_state_dict of {digest_of(tensors)}, rank={rank}", None)
        readers = readers_of("full_state_dict", processes, rank)
        for tensor in tensors:
            value = gathered(processes, tensor, readers)
            if value is not None and not record_of(tensor).is_newest(processes.rank):
                elsewhere[tensor] = value
        if processes.rank not in readers:
            return {}
    values = list(elsewhere.values())
    with exchanged(list(elsewhere), values):
        return _renamed(_copies(module.state_dict(), {storage(v) for v in values}))


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], strict: bool = True
) -> Any:
    """Does model.load_state_dict(state) on a model whose weights ranks share.

    state: the state of the whole model, equal on every rank, as full_state_dict or
        plain PyTorch returns it. Each rank takes the weights that it keeps; before the
        model's first call each rank takes all of them.

    Returns the result of load_state_dict. Raises PlanError if the ranks load unequal
    states.
    """
    module = module_of(model)
    tensors = _kept(module)
    if tensors:
        _agree_on(f"load_full_state_dict into {digest_of(tensors)}", state)
    given_up = [tensor for tensor in tensors if is_given_up(tensor)]
    with exchanged(given_up, [_empty(spec_of(tensor)) for tensor in given_up]):
        versions = [tensor._version for tensor in given_up]
        result = module.load_state_dict(_named_as_in(module, state), strict)
        for tensor, version in zip(given_up, versions, strict=True):
            parts = record_of(tensor).parts
            if parts and tensor._version != version:
                put(parts, tensor.data)
    return result


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns optimizer.state_dict() as in plain PyTorch, in copies on the CPU.

    Every rank must call it, and gets the state of all parameters. The state of a
    parameter comes from the first rank that updates it. Raises PlanError if another
    rank calls another function, or if the optimizer has none of the model's parameters.
    """
    parameters = optimized(model, optimizer)
    elsewhere: dict[Tensor, Any] = {}
    if are_placed(parameters):
        processes = everyone("full_optimizer_state_dict")
        every = range(processes.workers)
        states = states_of(processes, parameters, optimizer, lambda _: every)
        elsewhere = {
            parameter: states[i]
            for i, parameter in enumerate(parameters)
            if i in states and not _has_state(parameter, processes.rank)
        }
    before = {p: optimizer.state[p] for p in elsewhere if p in optimizer.state}
    optimizer.state.update(elsewhere)
    try:
        with unguarded(optimizer):
            state: dict[str, Any] = _copies(optimizer.state_dict(), set())
    finally:
        for parameter in elsewhere:
            del optimizer.state[parameter]
        optimizer.state.update(before)
    # in the order of the parameters, then what an optimizer of one's own has besides
    last = len(parameters)
    order = sorted(state["state"], key=lambda i: i if isinstance(i, int) else last)
    return {**state, "state": {i: state["state"][i] for i in order}}


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Does optimizer.load_state_dict(state); each rank takes the part it needs.

    state: the state of the whole optimizer, equal on every rank. Each rank takes the
        state of the parameters that it updates. Raises PlanError if the ranks load
        unequal states, or if the optimizer has none of the model's parameters.
    """
    parameters = optimized(model, optimizer)
    elsewhere: set[Tensor] = set()
    if are_placed(parameters):
        _agree_on(f"load_full_optimizer_state_dict of {digest_of(parameters)}", state)
        rank = everyone("load_full_optimizer_state_dict").rank
        elsewhere.update(updated_elsewhere(optimizer, rank))
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    left_out = {
        number
        for number, parameter in zip(numbers, parameters, strict=False)
        if parameter in elsewhere
    }
    states = {n: each for n, each in state["state"].items() if n not in left_out}
    optimizer.load_state_dict(copy.deepcopy({**state, "state": states}))
    cut_state(optimizer)


def _has_state(parameter: Tensor, rank: int) -> bool:
    """Whether a rank has an optimizer's state of all of a parameter."""
    record = record_of(parameter)
    return record.parts is None and record.is_updated(rank)


def module_of(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given."""
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"there is no state of a {type(model).__name__}; give the model, a "
            "torch.nn.Module, compiled or not"
        )
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def _kept(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers that ranks have between them, each once."""
    return [t for t in (*module.parameters(), *module.buffers()) if record_of(t).owners]


def optimized(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters."""
    of_model = set(map(id, module_of(model).parameters()))
    parameters = parameters_of(optimizer)
    if not any(id(parameter) in of_model for parameter in parameters):
        raise PlanError(
            "the optimizer has none of the model's parameters; give the model that it "
            "was made for"
        )
    return parameters


def digest_of(tensors: Sequence[Tensor]) -> str:
    specs = [str(record_of(t).spec or Spec.of(t)) for t in tensors]
    return f"{len(tensors)} tensors (digest {digest(specs)})"


def _agree_on(call: str, state: Mapping[str, Any]) -> None:
    digests = everyone(call.split()[0]).agree(call, digest(dict(state)))
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise PlanError(
                f"rank {rank} loads another state than rank 0; give every rank the "
                "same, for each takes the part that it keeps"
            )


def _empty(spec: Spec) -> Tensor:
    return spec._replace(device=torch.device("cpu")).empty()


def readers_of(call: str, processes: Processes, rank: int | None) -> Sequence[int]:
    """The ranks that get values: one, or all. Raises PlanError for one that isn't."""
    every = range(processes.workers)
    if rank is not None and rank not in every:
        raise PlanError(
            f"{call}(rank={rank!r}): give a rank from 0 to {processes.workers - 1}, or "
            "None for all"
        )
    return every if rank is None else [rank]


def gathered(
    processes: Processes, tensor: Tensor, readers: Sequence[int]
) -> Tensor | None:
    """The newest values of a tensor that ranks keep, on those that read them: itself
    where it has them, or a copy on the CPU."""
    follow_cast(tensor)
    record = record_of(tensor)
    if record.parts:
        parts = [gathered(processes, part, readers) for part in record.parts.parts]
        here = [part.detach().cpu() for part in parts if part is not None]
        return record.parts.cut.joined(here) if here else None
    others = [rank for rank in readers if rank not in record.newest]
    if processes.rank in others:
        tensor = _empty(spec_of(tensor))
    processes.share(tensor, record.source, others)
    return tensor if processes.rank in readers else None


def states_of(
    processes: Processes,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    readers: Callable[[Tensor], Sequence[int]],
) -> dict[int, Any]:
    """The optimizer's state of parameters, by position, on the ranks that read it; each
    from the first rank that updates it."""
    tensors: list[Tensor] = []
    places: list[int] = []

    def taken(value: Tensor) -> Any:
        if value.dim() == 0:
            return value.cpu()
        tensors.append(value)
        return _Slot(len(tensors) - 1)

    own: dict[tuple[int, int], Any] = {}
    for i, parameter in enumerate(parameters):
        if parameter in optimizer.state:
            state = pieces_of(parameter, optimizer.state[parameter])
            for number, each in state.items():
                if record_of(piece(parameter, number)).speaker == processes.rank:
                    own[i, number] = mapped(each, taken)
                    places += [i] * (len(tensors) - len(places))
    specs = [(i, Spec.of(t)) for i, t in zip(places, tensors, strict=True)]
    call = f"full_optimizer_state_dict of {digest_of(parameters)}"
    pieces: dict[tuple[int, int], Any] = {}
    for rank, (states, its) in enumerate(processes.agree(call, (own, specs))):
        values: list[Any] = []
        for i, spec in its:
            to = readers(parameters[i])
            mine = tensors[len(values)] if rank == processes.rank else None
            if mine is None and processes.rank in to:
                mine = _empty(spec)
            if mine is not None:
                processes.share(mine, rank, to)
            values.append(mine)
        pieces |= mapped(states, lambda value: value, values)
    result: dict[int, list[Any]] = {}
    for i, number in sorted(pieces):
        if processes.rank in readers(parameters[i]):
            result.setdefault(i, []).append(pieces[i, number])
    return {i: joined(parameters[i], states) for i, states in result.items()}


@dataclass(frozen=True)
class _Slot:
    """Where a tensor, which travels by itself, belongs."""

    index: int


def mapped(
    value: Any, change: Callable[[Tensor], Any], slots: Sequence[Tensor] = ()
) -> Any:
    """A value with its tensors changed and its slots filled, however deep they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _Slot):
        return slots[value.index]
    if isinstance(value, dict):
        items = {key: mapped(each, change, slots) for key, each in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if type(value) in (list, tuple):
        return type(value)(mapped(each, change, slots) for each in value)
    return copy.deepcopy(value)


def _copies(state: Any, new: set[int]) -> Any:
    """A state in copies on the CPU; what shared a tensor shares its copy. New storages
    are taken as they are."""
    copies: dict[Any, Tensor] = {}

    def copied(value: Tensor) -> Tensor:
        value = value.detach()
        if value.layout is not torch.strided:
            return value.to("cpu", copy=True)
        place = storage(value), value.storage_offset(), value.shape, value.stride()
        if place not in copies:
            fresh = place[0] in new
            copies[place] = value if fresh else value.to("cpu", copy=True)
        return copies[place]

    result = mapped(state, copied)
    if hasattr(state, "_metadata"):
        result._metadata = copy.deepcopy(state._metadata)
    return result


def plain_name(name: str) -> str:
    """A name without what torch.compile puts before those of the module it wraps."""
    return re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", name).removeprefix(".")


def _renamed(state: Any) -> dict[str, Any]:
    """A state whose names are those of the modules without their wrappers."""
    result: Any = OrderedDict(
        (plain_name(name), value) for name, value in state.items()
    )
    if hasattr(state, "_metadata"):
        versions = state._metadata.items()
        result._metadata = OrderedDict((plain_name(name), v) for name, v in versions)
    named: dict[str, Any] = result
    return named


def _named_as_in(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state with the names that a module, with compiled parts in it, has."""
    names = {plain_name(name): name for name in module.state_dict(keep_vars=True)}
    result = OrderedDict(
        (names.get(plain_name(name), name), value) for name, value in state.items()
    )
    return state if list(result) == list(state) else result
