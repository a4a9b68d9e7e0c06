"""Tensors of a call or a result, apart from the containers that they stand in."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

from .caller import PLAIN, TRACED, leaves

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
        key: list[Hashable] = []
        for name, leaf in leaves(value):
            if isinstance(leaf, TRACED):
                if id(leaf) not in numbers:
                    numbers[id(leaf)] = len(numbers)
                    self.names.append(name)
                    self.tensors.append(leaf)
                key.append((name, numbers[id(leaf)]))
            elif isinstance(leaf, PLAIN):
                key.append((name, type(leaf), leaf))
            elif isinstance(leaf, EMPTY) and not leaf:
                key.append((name, type(leaf)))
            else:
                key.append((name, id(leaf)))
                self._atoms.append(leaf)
        self.key = tuple(key)

    def with_tensors(self, tensors: Sequence[Any]) -> Any:
        """A copy of the value with others in the place of its tensors."""
        memo: dict[int, Any] = {id(each): each for each in self._atoms}
        memo.update(zip(map(id, self.tensors), tensors, strict=True))
        return copy.deepcopy(self.value, memo)

    def without_tensors(self) -> Structure:
        """The same, of which only the structure is wanted."""
        result = copy.copy(self)
        result.tensors = [object() for _ in self.tensors]
        result.value = self.with_tensors(result.tensors)
        return result
