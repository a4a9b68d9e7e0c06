"""What a model's Python reads of the model, beside tensors: a guard of what it traced.

Dynamo notes each value that it reads. torch.export runs the model's own Python, so
here attributes of modules are noted as they are read, and what hangs on them is
compared as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from .caller import PLAIN
from .noted_values import DEPTH, Noted

OWN = frozenset(vars(nn.Module()))  # what torch itself keeps of a module
OF_CLASSES = (*PLAIN, list, tuple, dict, set)
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


def noted_model(roots: Mapping[str, nn.Module], reads: Reads | None = None) -> Noted:
    """What modules hold beside the values of their tensors.

    roots: by how the model names them. reads: names that matter; None for all.
    """
    noted = Noted()
    for root, each in roots.items():
        for name, module in each.named_modules():
            _note_module(noted, f"{root}.{name}" if name else root, module, reads)
    return noted


def _note_module(
    noted: Noted, path: str, module: nn.Module, reads: Reads | None
) -> None:
    values, names = vars(module), None
    if reads is not None:
        read = reads.get(id(module), set())
        names = sorted({*read, *(OWN & values.keys())})
        for name in names:  # plain values that a class has for its objects
            kinds = (k for k in type(module).__mro__ if name in vars(k))
            kind = None if name in values else next(kinds, None)
            if kind is not None and isinstance(vars(kind)[name], OF_CLASSES):
                noted.note(kind.__name__, vars(kind), [name], DEPTH)
    if isinstance(module, nn.RNNBase):  # it writes them as its weights change
        names = [n for n in names or values if not n.startswith("_flat_weight")]
    noted.note(path, values, names)
