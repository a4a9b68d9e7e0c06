"""Which arguments of a call have a length that calls differ in, and what fills it up.

backend(lengths=) declares them: a length is rounded up to one that many calls share, so
that these share a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..ir.request import Fill, Lengths, Request
from ..jobs.job import PlanError
from .caller import Argument, parts
from .graph_inputs import placeholders
from .samples import check_dim, check_names, dim_of, names_of, only, user_tensors

STEPS = 4  # lengths of plans in each doubling
# what lengths="bucket" knows, by the names that Hugging Face gives arguments
KNOWN = {
    "input_ids": Fill(1, 0),
    "inputs_embeds": Fill(1, 0),
    "attention_mask": Fill(1, 0),
    "token_type_ids": Fill(1, 0),
    "position_ids": Fill(1, 0),
    "decoder_input_ids": Fill(1, 0),
    "decoder_attention_mask": Fill(1, 0),
    "labels": Fill(1, -100),
}


def bucket(length: int) -> int:
    """The length that a length is filled up to: 4 in each doubling, so that less than a
    quarter is added: 33 to 40 become 40, 41 to 48 48, 49 to 56 56, 57 to 64 64."""
    step = max(1, (1 << max(0, (length - 1).bit_length() - 1)) // STEPS)
    return -(-length // step) * step


def fill_of(argument: Argument, tensor: Tensor, lengths: Lengths) -> Fill | None:
    """What is declared of an argument that has that dimension, counted from the
    first."""
    if lengths == "bucket":
        fill = KNOWN.get(parts(argument.name)[-1])
        return fill if fill and fill.dim < tensor.dim() else None
    key = argument.key(lengths)
    if key is None:
        return None
    dim, value = lengths[key]
    has = -tensor.dim() <= dim < tensor.dim()
    return Fill(dim % tensor.dim(), value) if has else None


def symbolic_dims(argument: Argument, tensor: Tensor, request: Request) -> list[int]:
    """The dimensions whose sizes are others in other calls, or in a microbatch; one
    row can't be cut, and tracers take a length of 1 for a constant."""
    dims = set[int | None]()
    if isinstance(tensor, torch.nn.Parameter):
        return []
    if request.schedule.microbatches > 1:
        dims.add(dim_of(argument, tensor, request.batch_dims))
    if request.lengths is not None:
        fill = fill_of(argument, tensor, request.lengths)
        dims.add(fill and fill.dim)
    return sorted(d for d in dims if d is not None and tensor.shape[d] > 1)


class LengthInput(NamedTuple):
    """An input of the model's graph that is filled up.

    size: the graph's for that dimension, an int where the model fixes it.
    """

    input: int
    name: str
    fill: Fill
    length: int
    size: int | torch.SymInt


def declared_lengths(
    gm: fx.GraphModule, inputs: Sequence[Any], lengths: Lengths
) -> list[LengthInput]:
    """The inputs that have a declared length.

    Raises PlanError for declarations that don't fit the call.
    """
    if lengths != "bucket":
        check_names(gm.meta["call"], lengths, "lengths")
    nodes, found = placeholders(gm), []
    for i in user_tensors(gm, inputs):
        names = names_of(nodes[i])
        for name in names:
            declared = {} if lengths == "bucket" else lengths
            check_dim(name, inputs[i], declared, "lengths")
        fill = only({fill_of(n, inputs[i], lengths) for n in names}, names, "lengths")
        if fill is not None:
            _check_value(names[0].name, inputs[i], fill.value)
            length = inputs[i].shape[fill.dim]
            size = nodes[i].meta["example_value"].shape[fill.dim]
            found.append(LengthInput(i, names[0].name, fill, length, size))
    if lengths == "bucket" and not found:
        raise PlanError(
            f"backend(lengths='bucket') knows {', '.join(KNOWN)}, and the model is "
            f"called with {', '.join(gm.meta['call'].names)}; say what has the length, "
            'in which dimension, and what fills it up: lengths={"x": (1, 0)}'
        )
    return found


def _check_value(name: str, tensor: Tensor, value: float) -> None:
    """Raises PlanError for a value that the tensor's type doesn't have."""
    dtype, fits = tensor.dtype, True
    if dtype == torch.bool:
        fits = value in (0, 1)
    elif not (dtype.is_floating_point or dtype.is_complex):
        known = torch.iinfo(dtype)
        fits = float(value).is_integer() and known.min <= value <= known.max
    if not fits:
        raise PlanError(
            f"backend(lengths=) fills {name} up with {value}, which is no value of "
            f"{dtype}"
        )
