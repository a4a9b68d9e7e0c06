"""What a microbatch computes of values of all pairs by the numbers of its own rows."""

from __future__ import annotations

import torch
from torch import Tensor


def eye_rows(numbers: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Rows [n, size] of torch.eye(size): those of these numbers [n]."""
    columns = torch.arange(size, device=numbers.device)
    return (numbers.unsqueeze(1) == columns).to(dtype)


def eye_columns(numbers: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Columns [size, n] of torch.eye(size)."""
    columns = torch.arange(size, device=numbers.device)
    return (columns.unsqueeze(1) == numbers).to(dtype)


def own_diagonal(rows: Tensor, numbers: Tensor) -> Tensor:
    """The part [n] of a diagonal that is in rows [n, size] of these numbers [n]."""
    return rows.gather(1, numbers.unsqueeze(1)).squeeze(1)
