"""What steps of the optimizer take: sums of gradients, and what they are multiplied by,
which comes of the norms of all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..jobs.job import PlanError
from . import ops
from .gradient_sums import sum_gradients
from .graphs import Group, Spec, Specs
from .request import Request
from .step_ir import Line, Made, Message, Running, StepIR


def add_line(
    lines: list[Line | Message],
    where: Line,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    specs: Specs,
    name: str,
    group: int | None = None,
) -> Line:
    """A line on the worker and in the task of another, after all there are."""
    new = Line(where.worker, where.task, where.n, target, args, specs, name, group)
    lines.append(new)
    return new


def check_trained(groups: Sequence[Group], request: Request) -> None:
    """Raises PlanError for weights with gradients that the optimizer doesn't have, and
    for a stage that reads weights and gives none of them."""
    known = set(request.updates)
    for group in groups:
        for state, trained in zip(group.state, group.trained, strict=True):
            if trained and known and state.input not in known:
                raise PlanError(
                    f"{state.name} gets a gradient, but the optimizer doesn't have "
                    "it; add it to the optimizer, or freeze it with "
                    "requires_grad_(False)"
                )
        extra = set(group.stages) - set(group.givers)
        if any(group.trained) and extra:
            raise PlanError(
                f"stage {min(extra)} reads {group.names[0]} and gives no gradient "
                "of it, so that its update would not wait for it; keep what reads "
                "it in one stage, with same_stage="
            )


class UpdateInputs:
    """Makes the lines of a step that come before its updates, when they are asked for.

    lines: where they go.
    """

    def __init__(
        self, step: StepIR, request: Request, lines: list[Line | Message]
    ) -> None:
        self.step, self.request, self.lines = step, request, lines
        self.sums: dict[tuple[int, int], list[Running]] = {}
        for key in step.running:
            if key.what == "gradients":
                self.sums.setdefault((key.group, key.round), []).append(key)
        self.totals: dict[tuple[int, int], Running | Line | Made] = {**step.totals}
        self.norms: dict[tuple[int, int], Line] = {}  # of these
        self.factors: dict[tuple[int, int], Line] = {}  # by round and worker

    def gradients(self, group: int, number: int, n: int) -> Running | Line | Made:
        """A group's gradients since the last update, summed when first asked for."""
        key = group, number
        if key not in self.totals:
            total, new = sum_gradients(self.step, self.sums[key], n)
            self.lines += new
            self.totals[key] = total
        return self.totals[key]

    def factor(self, number: int, line: Line) -> Line | None:
        """What gradients are multiplied by on a worker, from the norms of all."""
        if self.request.clip_grad_norm is None and not self.request.skip_nonfinite:
            return None
        key = number, line.worker
        if key not in self.factors:
            norms, places = self._norms(number, line)
            limit, skips = self.request.clip_grad_norm, self.request.skip_nonfinite
            args = (limit, skips, places, *norms)
            spec = _like_all((), [norm.specs[0] for norm in norms])
            name = f"factor_{line.task}"
            self.factors[key] = add_line(
                self.lines, line, ops.clip_factor, args, (spec,), name
            )
        return self.factors[key]

    def _norms(
        self, number: int, line: Line
    ) -> tuple[list[Line], tuple[tuple[int, int], ...]]:
        """The norms of all groups' gradients, one for each parameter, and where that of
        each parameter is, in the optimizer's order."""
        rank = {position: i for i, position in enumerate(self.request.updates)}
        places: list[tuple[int, int, int]] = []
        norms: list[Line] = []
        for number_of, group in enumerate(self.step.facts.groups):
            inputs = [
                s.input for s, t in zip(group.state, group.trained, strict=True) if t
            ]
            places += (
                (rank.get(position, position), len(norms), k)
                for k, position in enumerate(inputs)
            )
            if inputs:
                norms.append(self._norm(number_of, number, line))
        return norms, tuple(place[1:] for place in sorted(places))

    def _norm(self, group: int, number: int, line: Line) -> Line:
        key = group, number
        if key not in self.norms:
            gradients = self.gradients(group, number, line.n)
            shapes, _ = self.step.specs(gradients)
            spec = _like_all((len(shapes),), shapes)
            task, name = f"norms {group} of round {number}", f"norms_{group}"
            where = Line(self.step.worker(gradients), task, line.n)
            self.norms[key] = add_line(
                self.lines, where, ops.norms, (gradients,), (spec,), name
            )
        return self.norms[key]


def _like_all(shape: tuple[int, ...], specs: Sequence[Spec]) -> Spec:
    """Of what torch.stack makes of numbers of these types."""
    dtype = functools.reduce(torch.promote_types, (spec.dtype for spec in specs))
    return Spec(shape, (1,) * len(shape), dtype, specs[0].device)
