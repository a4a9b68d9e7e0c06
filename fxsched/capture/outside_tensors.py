"""Weights that a model reads and doesn't register: a global module's, those in a list.

torch.export would make constants of them, without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..ir.graphs import tensors
from ..jobs.job import PlanError
from .own_gradients import refuse_grad_fn


class OutsideTensors(TorchFunctionMode):
    """While it is open, notes such weights, as `unknown`.

    known: what stands for those that are known, by their ids.
    """

    def __init__(self, known: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.known, self.unknown = known, dict[int, nn.Parameter]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        refuse_grad_fn(func)
        named = dict(kwargs or {})
        if any(map(_is_weight, tensors((args, named)))):
            args, named = tree_map(self._in_place_of, (tuple(args), named))
        return func(*args, **named)

    def _in_place_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not _is_weight(value):
            return value
        if not isinstance(value, nn.Parameter):
            raise PlanError(
                f"the model reads a tensor of shape {list(value.shape)} that has a "
                "gradient and isn't an argument or a parameter; make it an "
                "nn.Parameter, or pass it"
            )
        if id(value) not in self.known:
            self.unknown[id(value)] = value
        return self.known.get(id(value), value)


def _is_weight(value: Tensor) -> bool:
    if isinstance(value, FakeTensor):
        return False
    return isinstance(value, nn.Parameter) or value.requires_grad
