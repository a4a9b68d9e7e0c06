"""In which types values travel between jobs, where message_dtype= asks for one."""

from __future__ import annotations

import torch

from .graphs import Spec


def as_sent(spec: Spec, dtype: torch.dtype | None) -> Spec:
    """A tensor of floats as it travels between workers in this type.

    Numbers (0-d), such as losses, and what takes no more bytes travel as they are.
    """
    wide = dtype is not None and spec.dtype.itemsize > dtype.itemsize
    if not (wide and spec.dtype.is_floating_point and spec.shape):
        return spec
    return Spec.of(spec.empty("meta").to(dtype))._replace(device=spec.device)
