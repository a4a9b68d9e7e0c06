"""Gradients of a rank that has those of some parameters alone.

Each is a RankGradient, as is what is computed of it. A number of one parameter's
gradient is that of eager PyTorch. One of several parameters' gradients would leave out
those on other ranks: it is a PlanError where it is made. An optimizer's step sees plain
tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..jobs.job import PlanError


class RankGradient(Tensor):
    """A gradient, or what was computed of it.

    parameter: whose gradient, by its name.
    """

    parameter: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        values = [*args, *(kwargs or {}).values()]
        several = "foreach" in name  # one result for each gradient in a list
        lists = [value for value in values if isinstance(value, (list, tuple))]
        groups = list(zip_longest(*lists)) if several else [_flat(values)]
        parameters = [_only(group) for group in groups]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name == "as_subclass":
            return result
        if several and isinstance(result, (list, tuple)):
            return [_marked(r, p, ()) for r, p in zip(result, parameters, strict=True)]
        (parameter,) = parameters[:1] or (None,)
        if name == "item" and isinstance(result, float):
            return RankNumber(result, parameter)
        if isinstance(result, (list, tuple)):
            made = [_marked(each, parameter, values) for each in result]
            return type(result)(made) if type(result) in (list, tuple) else result
        return _marked(result, parameter, values)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)


class RankNumber(float):
    """A number of a RankGradient: its item()."""

    parameter: str | None

    def __new__(cls, value: float, parameter: str | None) -> RankNumber:
        number = super().__new__(cls, value)
        number.parameter = parameter
        return number


def _calculating(method: str) -> Callable[..., Any]:
    real = getattr(float, method)

    def calculate(number: RankNumber, *others: Any) -> Any:
        parameter = _only([number, *others])
        value = real(number, *others)
        return RankNumber(value, parameter) if isinstance(value, float) else value

    return calculate


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(RankNumber, _method, _calculating(_method))


def mark_gradients(parameters: Mapping[str, Tensor]) -> None:
    """Makes the .grad of parameters, by name, RankGradients."""
    for name, parameter in parameters.items():
        _marked(parameter.grad, name, ())


def _marked(value: Any, parameter: str | None, known: Sequence[Any]) -> Any:
    """A plain tensor becomes a RankGradient, unless it was there before."""
    if type(value) is Tensor and not any(value is each for each in known):
        marked: Any = value
        marked.__class__ = RankGradient
        marked.parameter = parameter
    return value


def _flat(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return flat


def _only(values: Sequence[Any]) -> str | None:
    """The parameter whose gradient is among values, if any.

    Raises PlanError for those of several.
    """
    marked = [v for v in values if isinstance(v, (RankGradient, RankNumber))]
    names = list(dict.fromkeys(value.parameter for value in marked))
    if names[1:]:
        raise PlanError(
            f"a number made of the gradients of {names[0]} and {names[1]} sees only "
            "the gradients of this rank; call fxsched.clip_grad_norm_(model, max_norm) "
            "or fxsched.gradient_norm(model), or for other numbers "
            "fxsched.parameter_sum(model, function), on every rank"
        )
    return names[0] if names else None


def unmarked(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Makes the gradients of parameters plain tensors; those that weren't."""
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    marked: list[Any] = [each for each in gradients if type(each) is RankGradient]
    for gradient in marked:
        gradient.__class__ = Tensor
    return marked


def mark_again(gradients: Iterable[Any]) -> None:
    """Undoes what `unmarked` did."""
    for gradient in gradients:
        gradient.__class__ = RankGradient
