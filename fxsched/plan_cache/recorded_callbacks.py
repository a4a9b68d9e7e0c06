"""What planning asked a schedule, to see whether another one answers the same.

w, n and the like are functions, of which nothing can be compared but their answers. A
plan depends on those alone that they gave while it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import networkx as nx

from ..jobs.own_caps import OwnCaps
from ..jobs.schedule import Schedule

FUNCTIONS = ("w", "n", "in_flight", "fit", "u", "version", "rate", "drift")


class Raised(NamedTuple):
    """That a function raised an error of this class."""

    error: str


class Question(NamedTuple):
    """A call of a function of a schedule, and its answer.

    schedule: 0 for the user's, from 1 on for its candidates, and then for those that
        fit gave, in their order, each before its own candidates.
    answer: of fit, the settings of the schedule that it gave.
    """

    schedule: int
    function: str
    arguments: tuple[Any, ...]
    answer: Any


@dataclass
class CallbackRecord:
    """The questions to the schedules that it listens to, each once, in their order."""

    questions: list[Question] = field(default_factory=list)
    over: bool = False
    _count: int = 0
    _known: set[tuple[Any, ...]] = field(default_factory=set)

    def listen(self, schedule: Schedule) -> Schedule:
        """The schedule, with functions that note what they are asked."""
        number, self._count = self._count, self._count + 1
        heard: dict[str, Any] = {}
        for name, function in _functions(schedule).items():
            noting = RecordedCallback(self, number, name, function)
            caps = schedule.in_flight if name == "in_flight" else None
            noted = replace(caps, cap=noting) if isinstance(caps, OwnCaps) else noting
            heard[name] = noted
        candidates = tuple(map(self.listen, schedule.candidates))
        return replace(schedule, **heard, candidates=candidates)

    def note(self, question: Question) -> None:
        """Writes a question down, unless it is known."""
        if question.function != "fit":  # whose argument is a graph
            if question[:3] in self._known:
                return
            self._known.add(question[:3])
        self.questions.append(question)

    def end(self) -> None:
        """Forgets all questions, and notes no more."""
        self.over = True
        self.questions.clear()
        self._known.clear()


@dataclass(frozen=True, eq=False, repr=False)
class RecordedCallback:
    """A function of a schedule that writes down what it is asked and answers."""

    asked: CallbackRecord
    schedule: int
    name: str
    function: Callable[..., Any]

    def __repr__(self) -> str:
        return repr(self.function)

    def __call__(self, *arguments: Any) -> Any:
        if self.asked.over:
            return self.function(*arguments)
        copied = tuple(a.copy() if isinstance(a, nx.Graph) else a for a in arguments)
        try:
            answer = self.function(*arguments)
        except Exception as error:
            self._note(copied, Raised(type(error).__qualname__))
            raise
        if not isinstance(answer, Schedule):
            self._note(copied, answer)
            return answer
        self._note(copied, settings(answer))
        return self.asked.listen(answer)

    def _note(self, arguments: tuple[Any, ...], answer: Any) -> None:
        self.asked.note(Question(self.schedule, self.name, arguments, answer))


def settings(schedule: Schedule) -> Mapping[str, Any]:
    """All of a schedule but what its functions answer, and of its candidates."""
    functions = _functions(schedule)
    values = vars(schedule) | {"candidates": tuple(map(settings, schedule.candidates))}
    return {
        name: "a function" if name in functions else value
        for name, value in values.items()
        if value is not getattr(Schedule, name, None)
    }


def answering(
    schedule: Schedule, questions: list[Question]
) -> dict[tuple[int, str], Any] | None:
    """The functions of the schedule, and of those that its fit gives, by number and
    name; None if an answer is another."""
    schedules = [*_all_functions(schedule)]
    for number, name, arguments, expected in questions:
        copied = tuple(a.copy() if isinstance(a, nx.Graph) else a for a in arguments)
        try:
            answer: Any = schedules[number][name](*copied)
        except Exception as error:
            answer = Raised(type(error).__qualname__)
        if isinstance(answer, Schedule):
            schedules += _all_functions(answer)
            answer = settings(answer)
        if type(answer) is not type(expected) or answer != expected:
            return None
    return {
        (number, name): function
        for number, functions in enumerate(schedules)
        for name, function in functions.items()
    }


def _all_functions(schedule: Schedule) -> Iterator[dict[str, Callable[..., Any]]]:
    """Those of a schedule and of its candidates, in the order of their numbers."""
    yield _functions(schedule)
    for candidate in schedule.candidates:
        yield from _all_functions(candidate)


def _functions(schedule: Schedule) -> dict[str, Callable[..., Any]]:
    """What was given of a schedule's functions, by name."""
    given = {name: vars(schedule)[name] for name in FUNCTIONS}
    caps = given["in_flight"]
    if isinstance(caps, OwnCaps):
        given["in_flight"] = caps.cap
    return {
        name: function
        for name, function in given.items()
        if callable(function) and function is not getattr(Schedule, name, None)
    }
