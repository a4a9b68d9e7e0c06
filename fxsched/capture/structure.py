"""Tensors of a call or a result, apart from the containers that they stand in."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .caller import DEPTH, STATE, inside

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
TRACED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
EMPTY: tuple[Any, ...] = (list, tuple, dict, set)


class Structure:
    """A value, taken apart.

    names: of the tensors in it, each once, by where it was found first.
    tensors: these tensors.
    key: equal for values that differ in their tensors alone.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.names: list[str] = []
        self.tensors: list[Any] = []
        self._atoms: list[Any] = []  # that no copy has its own of
        numbers: dict[int, int] = {}
        parts: list[Hashable] = []
        for name, leaf in _leaves(value, "", set(), 0):
            if isinstance(leaf, TRACED):
                if id(leaf) not in numbers:
                    numbers[id(leaf)] = len(numbers)
                    self.names.append(name)
                    self.tensors.append(leaf)
                parts.append((name, numbers[id(leaf)]))
            elif isinstance(leaf, PLAIN):
                parts.append((name, type(leaf), leaf))
            else:
                empty = isinstance(leaf, EMPTY) and not leaf
                parts.append((name, type(leaf) if empty else id(leaf)))
                self._atoms += [] if empty else [leaf]
        self.key = tuple(parts)

    def with_tensors(self, tensors: Sequence[Any]) -> Any:
        """A copy of the value with others in the place of its tensors."""
        memo: dict[int, Any] = {id(each): each for each in self._atoms}
        for old, new in zip(self.tensors, tensors, strict=True):
            memo[id(old)] = new
        return copy.deepcopy(self.value, memo)

    def without_tensors(self) -> Structure:
        """The same, of which only the structure is wanted."""
        result = copy.copy(self)
        result.tensors = [_Slot() for _ in self.tensors]
        result.value = self.with_tensors(result.tensors)
        return result


class _Slot:
    """The place of a tensor."""


def _leaves(
    value: Any, name: str, seen: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    """What is in containers and objects, and how to write it after the value's name."""
    whole = isinstance(value, (*TRACED, *PLAIN, *STATE)) or depth == DEPTH
    parts = [] if whole else list(inside(value))
    if not parts:
        yield name, value
    elif id(value) not in seen:
        seen.add(id(value))
        for end, each in parts:
            yield from _leaves(each, name + end, seen, depth + 1)
