"""What a program computes, on symbols: one expression for each value.

A closed symbol is a tuple of a word and what it is of; equal tuples are equal values. A
job's results are named by the job, and weights by their version, since what each job
and each update reads is proved by itself. So expressions stay small. An open symbol has
in it what came with a message, or what another worker wrote last; `Links.close` puts
that in, once the programs are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class Symbol(tuple[Any, ...]):
    """A closed expression: a word, and what it is of."""

    __slots__ = ()


class Open:
    """An expression with something in it that this program does not show."""

    __slots__ = ("args", "word")

    def __init__(self, word: str, args: tuple[Any, ...]) -> None:
        self.word, self.args = word, args

    def __reduce__(self) -> tuple[type[Open], tuple[str, tuple[Any, ...]]]:
        return Open, (self.word, self.args)


RECEIVED, LATEST = "received", "latest"  # a tag; a group and a worker


def received(tag: int) -> Open:
    """What comes with a message."""
    return Open(RECEIVED, (tag,))


def latest(group: int, worker: int) -> Open:
    """The buffers of a group that a worker's jobs leave."""
    return Open(LATEST, (group, worker))


def symbol(word: str, *args: Any) -> Any:
    """An expression, in the form that all have which are of equal value."""
    first = args[0] if args else None
    if word == "sum" and isinstance(first, Open) and first.word == "sum":
        return Open(word, (*first.args, *args[1:]))
    if any(map(is_open, args)):
        return Open(word, args)
    rule = RULES.get(word)
    return rule(*args) if rule else Symbol((word, *args))


def is_open(value: Any) -> bool:
    """Whether it, or something in it, is an open symbol."""
    kind = type(value)
    if kind is Open:
        return True
    return kind is tuple and any(map(is_open, value))


def _sum(first: Any = (), *others: Any) -> Any:
    """One after the other: (a + b) + c is a + b + c, and a + (b + c) is not."""
    if not others:
        return first
    if first[:1] == ("piece",) and all(o[:-1] == first[:-1] for o in others):
        whole = _sum(first[-1], *(other[-1] for other in others))
        return Symbol((*first[:-1], whole))  # of the sum, as additions are by element
    if first[:1] == ("sum",):
        return Symbol((*first, *others))
    return Symbol(("sum", first, *others))


def _item(value: Any, position: int) -> Any:
    if value[:1] == ("bundle",) and 0 <= position < len(value) - 1:
        return value[1 + position]
    return Symbol(("item", value, position))


def _collected(how: Any, count: int, *parts: tuple[tuple[int, ...], Any]) -> Any:
    """Values of microbatches from several bundles, in the order of microbatches."""
    values = {b: _item(bundle, i) for held, bundle in parts for i, b in enumerate(held)}
    if sorted(values) != list(range(count)) or sum(len(p[0]) for p in parts) != count:
        return Symbol(("some of", how, *sorted(values)))
    return Symbol((how, *(values[b] for b in range(count))))


def _join(layout: Any, *pieces: Any) -> Any:
    """All pieces of one value, in their order, are the value; those of sums may each be
    added up in an order of its own."""
    count, wholes = len(pieces), [piece[-1] for piece in pieces]
    for number, each in enumerate(pieces):
        if each[:-1] != ("piece", number, count, layout):
            return Symbol(("join", *pieces))
    return wholes[0] if len({*wholes}) == 1 else Symbol(("joined", *wholes))


def _decoded(codes: Any, value: Any) -> Any:
    """A value that has travelled; that it is rounded is what encode= asks for."""
    if value[:2] == ("encoded", codes):
        return value[2]
    return Symbol(("decoded", codes, value))


def _reloaded(handle: Any) -> Any:
    """What waited elsewhere, come back."""
    is_handle = handle[:1] == ("offloaded",)
    return handle[1] if is_handle else Symbol(("reloaded", handle))


RULES: Mapping[str, Callable[..., Any]] = {
    "sum": _sum,
    "item": _item,
    "collected": _collected,
    "join": _join,
    "decoded": _decoded,
    "reloaded": _reloaded,
}


class Links:
    """What open symbols are, by what all programs show.

    sent: the symbol that is sent under each tag. left: by group and worker, the buffers
        that its jobs leave.
    """

    def __init__(
        self, sent: Mapping[int, Any], left: Mapping[tuple[int, int], Any]
    ) -> None:
        self.sent, self.left = sent, left
        self.closed: dict[int, Any] = {}  # by the id of an open one
        self.kept: list[Any] = []  # open ones, so that no id is used again

    def close(self, value: Any) -> Any:
        """The closed symbol that a value is."""
        if type(value) is tuple:
            return tuple(map(self.close, value))
        if not isinstance(value, Open):
            return value
        known = self.closed.get(id(value))
        if known is None:
            known = self.closed[id(value)] = self._close(value)
            self.kept.append(value)
        return known

    def _close(self, value: Open) -> Any:
        if value.word == RECEIVED:
            return self.close(self.sent[value.args[0]])
        if value.word == LATEST:
            return self.close(self.left.get(value.args, Symbol(("nothing",))))
        return symbol(value.word, *map(self.close, value.args))


class Matcher:
    """Whether closed symbols are what a reference says.

    gradient: the reference's sum of a group's gradients, by what the word "gradient" is
        of; a "terms" in it may be added up in any order.
    """

    def __init__(self, gradient: Callable[..., Any]) -> None:
        self.gradient = gradient
        self.known: dict[tuple[int, Any], bool] = {}
        self.counted: dict[int, Counter[Any]] = {}
        self.kept: list[Any] = []

    def matches(self, actual: Any, wanted: Any) -> bool:
        """Whether a closed symbol is the wanted one."""
        if actual is wanted:
            return True
        if not isinstance(wanted, tuple):
            return type(actual) is type(wanted) and bool(actual == wanted)
        if is_gradient(wanted):
            key = id(actual), wanted
            if key not in self.known:
                self.known[key] = self.matches(actual, self.gradient(*wanted[1:]))
                self.kept.append(actual)
            return self.known[key]
        if wanted[:1] == ("terms",):
            return Counter(terms(actual)) == self._counted(wanted)
        return (
            isinstance(actual, tuple)
            and len(actual) == len(wanted)
            and all(map(self.matches, actual, wanted))
        )

    def _counted(self, wanted: Any) -> Counter[Any]:
        if id(wanted) not in self.counted:
            self.counted[id(wanted)] = Counter(wanted[1:])
            self.kept.append(wanted)
        return self.counted[id(wanted)]


def is_gradient(wanted: Any) -> bool:
    """Whether a wanted value is a named gradient."""
    return isinstance(wanted, tuple) and wanted[:1] == ("gradient",)


def terms(value: Any) -> Iterator[Any]:
    """What a sum adds up, sums in it too, and one whose pieces all add up the same; of
    anything else, itself."""
    stack = [value]
    while stack:
        each = stack.pop()
        word = each[:1] if isinstance(each, tuple) else ()
        if word == ("sum",):
            stack += each[1:]
        elif word == ("joined",) and _alike([Counter(terms(own)) for own in each[1:]]):
            stack.append(each[1])
        else:
            yield each


def _alike(values: Sequence[Any]) -> bool:
    return all(each == values[0] for each in values)


SHOWN = 6  # values of one expression, in an error


def text(value: Any) -> str:
    """A symbol in words."""
    if isinstance(value, Open):
        value = (value.word, *value.args)
    if not isinstance(value, tuple):
        return str(value)
    word, *args = value or ("",)
    if isinstance(word, tuple):  # how values of microbatches become one
        word = f"{word[0]} by {word[1]} of "
    said = SAID.get(word)
    if said is not None:
        return said(*args)
    shown = ", ".join(map(text, args[:SHOWN]))
    return f"{word}({shown}{', ..' * (len(args) > SHOWN)})"


def _item_text(value: Any, position: int) -> str:
    if value[:1] == ("job",):
        return f"result {position} of {value[1]}"
    return f"item {position} of {text(value)}"


def _weights_text(group: int, version: int, *replica: int) -> str:
    where = "".join(f" on worker {worker}" for worker in replica)
    return f"version {version} of group {group}{where}"


def _sum_text(*values: Any) -> str:
    shown = " + ".join(map(text, values[:SHOWN]))
    return f"({shown}{' + ..' * (len(values) > SHOWN)})"


def _cast_text(value: Any, dtypes: tuple[Any, ...]) -> str:
    return f"{text(value)} as {', '.join(dict.fromkeys(map(str, dtypes)))}"


SAID: Mapping[str, Callable[..., str]] = {
    "item": _item_text,
    "job": lambda job: f"the results of {job}",
    "rows": lambda value, b, *_: f"rows {b} of {text(value)}",
    "in": str,
    "nothing": lambda: "nothing",
    "weights": _weights_text,
    "stale": lambda group: f"a copy of group {group} from before the last update",
    "live": lambda group: f"group {group} where updates change it",
    "read": lambda group, b: f"the copy of group {group} for microbatch {b}",
    "updated": lambda stage, b: f"{stage}U{b}",
    "averaged": lambda group, version, _: (
        f"the average of group {group} after {version} updates"
    ),
    "gradient": lambda group, *_: f"the gradient of group {group}",
    "sum": _sum_text,
    "piece": lambda i, count, _, value: f"piece {i} of {count} of {text(value)}",
    "terms": _sum_text,
    "joined": lambda *wholes: (
        f"what has a piece each of {', '.join(map(text, wholes))}"
    ),
    "encoded": lambda _, value: f"the encoded {text(value)}",
    "decoded": lambda _, value: f"what was encoded as {text(value)}",
    "cast": _cast_text,
}
