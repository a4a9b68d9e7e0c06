"""The schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping

from ..jobs.job import PlanError
from ..jobs.schedule import Schedule

Constructor = Callable[..., Schedule]


class Library(Mapping[str, Constructor]):
    """The functions that make schedules, by name.

    Each also has the name of its function: "1f1b" is one_f_one_b. Iteration lists each
    schedule once.
    """

    def __init__(self, constructors: Mapping[str, Constructor]) -> None:
        self._constructors = dict(constructors)
        names = {make.__name__: name for name, make in constructors.items()}
        self._names = names | {name: name for name in constructors}

    def name(self, text: str) -> str:
        """The listed name of a schedule. Raises PlanError for an unknown name."""
        if text in self._names:
            return self._names[text]
        near = difflib.get_close_matches(text.lower(), self._names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PlanError(
            f"there is no schedule {text!r} (choose from {', '.join(self)}){hint}"
        )

    def __getitem__(self, name: str) -> Constructor:
        return self._constructors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._constructors)

    def __len__(self) -> int:
        return len(self._constructors)
