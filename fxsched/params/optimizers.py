"""Optimizers of the user's class on other parameters, to step some, or to try one."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Known = dict[tuple[int, torch.Size, torch.dtype], int]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order that numbers them in optimizer.state_dict()."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def sharing(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class, with the same attributes; the step is the class's
    own, not what a scheduler or a hook put around it."""
    own: Optimizer = object.__new__(type(optimizer))
    own.__dict__.update(optimizer.__dict__)
    own.__dict__.pop("step", None)
    return own


def state_bytes(optimizer: Optimizer | None, args: Sequence[Any]) -> Mapping[int, int]:
    """Bytes of the optimizer's state of each of the arguments of a call that it has,
    by position; {} without an optimizer, and where that cannot be found out.

    A copy of the optimizer steps parameters like them, one of each shape: on the meta
    device, or, where its step looks at numbers, zeros.
    """
    if optimizer is None:
        return {}
    at = {id(value): i for i, value in enumerate(args) if isinstance(value, Tensor)}
    known: Known = {}
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            position = at.get(id(parameter))
            if position is None or not parameter.requires_grad:
                continue
            key = number, parameter.shape, parameter.dtype
            if key not in known:
                size = _after_a_step(optimizer, group, parameter)
                if size is None:
                    return {}
                known[key] = size
            found[position] = known[key]
    return found


def _after_a_step(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> int | None:
    """Bytes of the state of one parameter after its first step; None if it fails."""
    for device in ("meta", "cpu"):
        like = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        like.requires_grad_().grad = torch.zeros_like(like)
        try:
            own = alone(optimizer, group, like)
            with torch.no_grad():
                own.step()
        except Exception:  # the user's own class, and what it can't do on meta tensors
            continue
        return sum(v.nbytes for v in own.state[like].values() if isinstance(v, Tensor))
    return None


def alone(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> Optimizer:
    """An optimizer of the same class with one parameter, and nothing in common."""
    own: Optimizer = object.__new__(type(optimizer))
    shared = {"step", "state", "param_groups"}
    rest = {k: v for k, v in optimizer.__dict__.items() if k not in shared}
    memo = {id(p): p for g in optimizer.param_groups for p in g["params"]}
    own.__dict__.update(copy.deepcopy(rest, dict(memo)))
    own.state = defaultdict(dict)
    plain = {k: False for k in ("fused", "foreach", "capturable") if group.get(k)}
    own.param_groups = [{**group, **plain, "params": [parameter]}]
    return own
