"""Says how early receives are posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...ir import ops
from ...ir.request import Request
from ...ir.step import Message, Op, Step, Value, read

WINDOW, BYTES = 4, 1 << 22  # of one sender, or more while they are so small together


def place_receives(step: Step, request: Request) -> Step:
    """Ops that post receives of later ops, so that messages come while their receiver
    works.

    before: message 3, 1F0, message 4, 1F1, message 5, 1F2           # worker 1
    after:  the same; 1F0 posts messages 3 and 4, 1F1 posts message 5

    A receive that is posted has a buffer, whether its message has come or not. So each
    worker posts up to 4 receives of each sender (or more, if they take less than 4 MiB)
    in the order of lines. Messages between workers that share memory need no buffer:
    these receives are posted where they are read, as are all that step.posts doesn't
    name. So are weights, which route_values asks for ahead.
    With request.ordered, as with NCCL, all receives are posted where they stand: after
    the op that makes the value, in one order of the lines of all workers. What a device
    launched before them is done without them, however few queues it has.
    """
    posts: dict[Op, list[Message]] = {}
    if request.apart and not request.ordered:
        for worker, lines in enumerate(step.lines_of):
            pauses = (i for i, line in enumerate(lines, 1) if _is_pause(line))
            end = next(pauses, len(lines))
            _post(posts, lines[:end], worker, request)
            _post(posts, lines[end:], worker, request)
    return replace(step, posts=posts)


def _is_pause(line: Op | Message) -> bool:
    return isinstance(line, Op) and line.target is ops.pause


def _post(
    posts: dict[Op, list[Message]],
    lines: Sequence[Op | Message],
    worker: int,
    request: Request,
) -> None:
    """Has the ops of a phase of a worker post its receives."""
    senders: dict[int, _Sender] = {}
    sender_of: dict[Value, _Sender] = {}
    for line in lines:
        if isinstance(line, Op) or line.to != worker or line.fetches:
            continue
        if not request.near(line.source, worker):
            sender = senders.setdefault(line.source, _Sender())
            sender.left.append(line)
            sender_of[line.value] = sender
    at = next((line for line in lines if isinstance(line, Op)), None)
    if at is None:
        return
    posted = posts.setdefault(at, [])
    for sender in senders.values():
        posted += sender.more()
    for line in lines:
        if isinstance(line, Op):
            posted = posts.setdefault(line, [])
        for value in read(line, worker):
            if value in sender_of:
                posted += sender_of.pop(value).taken(value)


class _Sender:
    """What one worker sends another: receives not posted yet, and the bytes of those
    that are posted and not taken."""

    def __init__(self) -> None:
        self.left: deque[Message] = deque()
        self.coming: dict[Value, int] = {}

    def more(self) -> Iterator[Message]:
        """The receives that may be posted now."""
        while self.left:
            size = sum(self.coming.values()) + self.left[0].bytes
            if len(self.coming) >= WINDOW and size > BYTES:
                return
            yield self._next()

    def taken(self, value: Value) -> Iterator[Message]:
        """The receives that are posted when a value is taken: all up to its own, and
        those for which there is room then."""
        while value not in self.coming:
            yield self._next()
        del self.coming[value]
        yield from self.more()

    def _next(self) -> Message:
        message = self.left.popleft()
        self.coming[message.value] = message.bytes
        return message
