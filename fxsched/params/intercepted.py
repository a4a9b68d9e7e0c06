"""Methods of single tensors that answer otherwise than torch's.

A parameter that isn't here looks like one, for PyTorch goes on with it: its type says
to Dynamo that nothing changed, and it is in the module and in the optimizer. Attributes
of the tensor itself, which Python finds before those of its class, say what is wrong
where its values would be read, or leave a change to the ranks that keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

READS = ("detach", "clone", "__deepcopy__", "__reduce_ex__")
WRITES = ("copy_",)
CASTS = ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16")
FILLS = (
    *("uniform_", "normal_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"),
    *("geometric_", "random_", "zero_", "fill_"),
)
CHANGES = (
    *("add_", "sub_", "mul_", "div_", "neg_", "pow_", "lerp_", "addcmul_", "addcdiv_"),
    *("clamp_", "clamp_min_", "clamp_max_", "erfinv_"),
)
HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def intercept(
    tensor: Tensor, methods: Iterable[str], answer: Callable[..., Any]
) -> None:
    """Has answer(tensor, method, *arguments) called in the place of these methods; a
    trace, which reads no values, gets torch's."""
    for method in methods:
        setattr(tensor, method, MethodType(_intercepted(method, answer), tensor))


def let_through(tensor: Tensor) -> None:
    """Gives a tensor torch's methods back."""
    for method in (*READS, *WRITES, *CASTS, *FILLS, *CHANGES, *HOOKS):
        vars(tensor).pop(method, None)


def _intercepted(method: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    real = getattr(Tensor, method)  # Dynamo looks up no attribute of a type

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return real(tensor, *args, **kwargs)
        return answer(tensor, method, *args, **kwargs)

    return call
