"""Parts of weights while a program steps them, and the optimizer's state of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ir.graphs import storage
from ..ir.parts import PartOf
from .optimizer_steps import cut_state
from .record import mapped_alike, record_of, stacked


class Apart(NamedTuple):
    """How what belongs to a weight comes apart into that of its parts here.

    like: the shape of what does; the rest belongs to each part as it is. one: of such
    a tensor, what belongs to a part, by its number among those here. joined: the other
    way round.
    """

    like: torch.Size
    one: Callable[[Tensor, int], Tensor]
    joined: Callable[[Sequence[Tensor]], Tensor]


class Stepped(NamedTuple):
    """A weight whose parts are stepped: those that are here, and their positions."""

    weight: Tensor
    apart: Apart
    parts: dict[int, Tensor]


class CallParts:
    """Parts of the weights of a call, with an optimizer's state of each.

    Between calls a process that has all workers has whole weights, and whole state of
    them; a rank has of both what belongs to the parts that it keeps. In a call each
    part is a parameter of its own, and so is its state: views of what there was, or
    copies, which are put together again at its end.

    own: positions of the parts that are stepped here.
    """

    def __init__(
        self, optimizer: Optimizer, parts: Mapping[int, PartOf], own: Collection[int]
    ) -> None:
        self.optimizer, self.parts, self.own = optimizer, parts, own
        self.stepped: list[Stepped] = []
        self.views: dict[int, tuple[Tensor, Tensor]] = {}  # of state, and of what

    def begin(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of a call, with parameters in the place of parts."""
        if not self.parts:
            return args
        cut_state(self.optimizer)
        own = list(args)
        by_weight: dict[int, list[int]] = {}
        for position, part in self.parts.items():
            by_weight.setdefault(part.input, []).append(position)
        for index, positions in by_weight.items():
            weight = args[index]
            if not weight.requires_grad:
                continue
            stepped = self._stepped(weight, positions, args)
            for position, parameter in stepped.parts.items():
                own[position] = parameter
            self.stepped.append(stepped)
            self._divide_state(stepped)
        return own

    def end(self) -> None:
        """Makes weights, and the optimizer's state of them, of those of their parts."""
        stepped, self.stepped = self.stepped, []
        for each in stepped:
            if record_of(each.weight).parts is None:
                _write(each)
            self._join_state(each)
        self.views = {}

    def weights(self) -> dict[int, Tensor]:
        """The weight of each part that is stepped, by the id() of the part."""
        return {
            id(part): each.weight
            for each in self.stepped
            for part in each.parts.values()
        }

    def _stepped(
        self, weight: Tensor, positions: Sequence[int], args: Sequence[Any]
    ) -> Stepped:
        cut = self.parts[positions[0]].cut
        own = record_of(weight).parts
        if own is None:
            parts: dict[int, Tensor]
            parts = {i: nn.Parameter(args[i].detach()) for i in positions}
            return Stepped(weight, Apart(weight.shape, cut.part, cut.joined), parts)
        here = {i: args[i] for i in positions if self.parts[i].number in own.kept}
        one = _one_of if own.kept[1:] else _itself
        apart = Apart(own.values.shape, one, stacked)
        return Stepped(weight, apart, here)

    def _divide_state(self, stepped: Stepped) -> None:
        state = self.optimizer.state.get(stepped.weight)
        if not state:
            return
        for number, (position, part) in enumerate(stepped.parts.items()):
            if position in self.own:
                take = partial(self._piece, stepped.apart, number)
                self.optimizer.state[part] = mapped_alike(take, state)

    def _piece(self, apart: Apart, number: int, value: Tensor) -> Tensor:
        """Of a tensor in a weight's state, that of a part."""
        if value.shape != apart.like:
            return value.clone()
        piece = apart.one(value, number)
        self.views[id(piece)] = piece, value
        return piece

    def _join_state(self, stepped: Stepped) -> None:
        states = [self.optimizer.state.pop(p, None) for p in stepped.parts.values()]
        known = next((state for state in states if state), None)
        if known is not None:
            shape = next(iter(stepped.parts.values())).shape
            # of parts that are kept here, and stepped elsewhere
            nothing = mapped_alike(partial(_zeros, shape), known)
            every = [state or nothing for state in states]
            join = partial(self._whole, stepped.apart, shape)
            self.optimizer.state[stepped.weight] = mapped_alike(join, *every)

    def _whole(self, apart: Apart, shape: torch.Size, *pieces: Tensor) -> Tensor:
        """A tensor of a weight's state, of those of its parts, which are of a shape."""
        if pieces[0].shape != shape:
            return pieces[0]
        wholes = [self.views.get(id(piece), (piece, piece))[1] for piece in pieces]
        first = wholes[0]
        if any(whole is not first for whole in wholes) or first is pieces[0]:
            return apart.joined(pieces)
        if storage(pieces[0]) != storage(first):
            first.copy_(apart.joined(pieces))
        return first


def _write(stepped: Stepped) -> None:
    """Puts parts into the weight that they are copies of."""
    weight, parts = stepped.weight, list(stepped.parts.values())
    if storage(parts[0]) == storage(weight):
        torch.autograd.graph.increment_version(weight)
        return
    with torch.no_grad():
        weight.copy_(stepped.apart.joined([part.detach() for part in parts]))


def _zeros(shape: torch.Size, value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.shape == shape else value


def _one_of(stacked: Tensor, number: int) -> Tensor:
    return stacked[number]


def _itself(value: Tensor, number: int) -> Tensor:
    return value
