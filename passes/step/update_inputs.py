"""What gradients are multiplied by before an update: it comes of the norms of all."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ...ir import ops
from ...ir.graphs import Group, Spec
from ...ir.request import Request
from ...ir.step import Message, Op, Step, Total
from ...jobs.job import PlanError


def check_trained(groups: Sequence[Group], request: Request) -> None:
    """Raises PlanError for weights with gradients that the optimizer doesn't have."""
    known = set(request.updates)
    for group in groups:
        for state in group.learned:
            if known and state.input not in known:
                raise PlanError(
                    f"{state.name} gets a gradient, but the optimizer doesn't have "
                    "it; add it to the optimizer, or freeze it with "
                    "requires_grad_(False)"
                )


class UpdateFactors:
    """Makes the ops that come before updates, when they are asked for.

    lines: where they go.
    """

    def __init__(self, step: Step, request: Request, lines: list[Op | Message]) -> None:
        self.step, self.request, self.lines = step, request, lines
        self.norms: dict[Total, Op] = {}
        self.factors: dict[tuple[int, int], Op] = {}  # by round and worker

    def factor(self, number: int, update: Op) -> Op | None:
        """What gradients are multiplied by on a worker, from the norms of all."""
        limit, skips = self.request.clip_grad_norm, self.request.skip_nonfinite
        if limit is None and not skips:
            return None
        key = number, update.worker
        if key not in self.factors:
            norms, places = self._norms(number, update.n)
            args = (limit, skips, places, *norms)
            spec = _like_all((), [norm.specs[0] for norm in norms])
            where, name = (*key[1:], update.task, update.n), f"factor_{update.task}"
            self.factors[key] = Op(*where, ops.clip_factor, args, (spec,), name)
            self.lines.append(self.factors[key])
        return self.factors[key]

    def _norms(
        self, number: int, n: int
    ) -> tuple[list[Op], tuple[tuple[int, int], ...]]:
        """The norms of all groups' gradients, one for each parameter, and where that of
        each parameter is, in the optimizer's order."""
        rank = {position: i for i, position in enumerate(self.request.updates)}
        places: list[tuple[int, int, int]] = []
        norms: list[Op] = []
        for number_of, group in enumerate(self.step.facts.groups):
            places += (
                (rank.get(state.input, state.input), len(norms), k)
                for k, state in enumerate(group.learned)
            )
            if any(group.trained):
                norms.append(self._norm(Total(number_of, number), n))
        return norms, tuple(place[1:] for place in sorted(places))

    def _norm(self, total: Total, n: int) -> Op:
        if total not in self.norms:
            shapes, _ = self.step.specs(total)
            spec = _like_all((len(shapes),), shapes)
            task = f"norms {total.group} of round {total.round}"
            where, name = (self.step.worker(total), task, n), f"norms_{total.group}"
            self.norms[total] = Op(*where, ops.norms, (total,), (spec,), name)
            self.lines.append(self.norms[total])
        return self.norms[total]


def _like_all(shape: tuple[int, ...], specs: Sequence[Spec]) -> Spec:
    """Of what torch.stack makes of numbers of these types."""
    dtype = functools.reduce(torch.promote_types, (spec.dtype for spec in specs))
    return Spec(shape, (1,) * len(shape), dtype, specs[0].device)
