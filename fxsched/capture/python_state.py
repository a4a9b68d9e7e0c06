"""What a model's Python reads of the model, beside tensors: a guard of what it traced.

Dynamo notes each value that it reads. torch.export runs the model's own Python, so
here attributes of modules are noted as they are read, and what hangs on them is
compared as a whole, by the ids of what containers hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from .noted_values import DEPTH, Noted
from .structure import PLAIN

OWN = frozenset(vars(nn.Module()))  # what torch itself keeps of a module
Reads = Mapping[int, set[str]]


@contextmanager
def noted_reads() -> Iterator[Reads]:
    """Notes which attributes of modules are read, by the modules' ids."""
    reads: dict[int, set[str]] = {}

    def noting(module: nn.Module, name: str) -> Any:
        reads.setdefault(id(module), set()).add(name)
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = noting  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__


class PythonState(Noted):
    """What a model holds beside the values of its tensors.

    reads: names that matter, by module; None for all.
    outside: modules that it calls and doesn't hold, by how it names them.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Reads | None = None,
        outside: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        for root, each in {"self": model, **(outside or {})}.items():
            for name, module in each.named_modules():
                self._module(f"{root}.{name}" if name else root, module, reads)

    def _module(self, path: str, module: nn.Module, reads: Reads | None) -> None:
        values = vars(module)
        if reads is None:
            names, whole = list(values), not isinstance(module, nn.RNNBase)
        else:
            read = reads.get(id(module), set())
            names, whole = sorted({*read, *(OWN & values.keys())}), False
            self._of_class(type(module), [n for n in names if n not in values])
        if isinstance(module, nn.RNNBase):  # it writes them as its weights change
            names = [name for name in names if not name.startswith("_flat_weight")]
        self.note(path, values, names, whole)

    def _of_class(self, kind: type, names: Sequence[str]) -> None:
        """Plain values that a class has for its objects."""
        for name in names:
            for each in kind.__mro__:
                if name in vars(each):
                    if _plain(vars(each)[name]):
                        self.note(each.__name__, vars(each), [name], False, DEPTH)
                    break


def _plain(value: object) -> bool:
    return isinstance(value, (*PLAIN, list, tuple, dict, set))
