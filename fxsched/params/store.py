"""The parameters and buffers of a compiled model, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .record import Record, record_of


class ParamStore(Mapping[str, Record]):
    """What is known of each parameter and buffer of a model, by name.

    A name is the first that the compiled module has for it; tied weights are one. A
    tensor that is reached otherwise has its Python expression: self.tables[0]. Where a
    name has another tensor since the last call, it is that one's.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, TensorWeakRef] = {}

    def take(self, names: Mapping[str, int], args: Sequence[Any]) -> None:
        """Takes those of a call, whose positions among its inputs `names` says."""
        for name, position in names.items():
            tensor, known = args[position], self._tensors.get(name)
            if isinstance(tensor, Tensor) and (known is None or known() is not tensor):
                self._tensors[name] = TensorWeakRef(tensor)

    def __getitem__(self, name: str) -> Record:
        tensor = self._tensors[name]()
        if tensor is None:
            raise KeyError(f"{name} is gone since the last call")
        return record_of(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
