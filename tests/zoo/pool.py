"""Processes that run rows of the zoo, each with a limit of time."""

from __future__ import annotations

import importlib.util
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue

from .compare import Asked, Row

ROWS = 30  # that a process runs before a fresh one takes its place


def serve(connection: Connection) -> None:
    """Runs the rows whose names come, until None comes."""
    import logging
    import os
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from . import cases, compare

    declare_torchvision()
    known = cases.all_cases()
    while (asked := connection.recv()) is not None:
        name, how = asked
        connection.send(compare.run(known[name], how))


def declare_torchvision() -> None:
    """Lets torchvision be imported where its binaries are for another torch.

    No row runs its own operations, but it describes some when it is imported, and
    transformers and timm import it where it is installed.
    """
    import torch

    place = importlib.util.find_spec("torchvision")
    if place is None or place.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(place.origin).parent / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float limit) -> Tensor")
        DECLARED.append(library)


DECLARED: list[object] = []  # while it is kept


class Slot:
    """A process of the pool, started when it is needed."""

    def __init__(self, limit: float) -> None:
        self.limit, self.rows = limit, 0
        self.process: multiprocessing.process.BaseProcess | None = None

    def run(self, name: str, asked: Asked) -> Row:
        if self.process is None or self.rows >= ROWS:
            self.stop()
            self.start()
        self.rows += 1
        self.connection.send((name, asked))
        try:
            if self.connection.poll(self.limit):
                row: Row = self.connection.recv()
                return row
            detail = f"not done after {self.limit:.0f} s"
        except (EOFError, ConnectionError):
            detail = "its process ended"
        assert self.process is not None
        self.process.kill()
        self.process.join()
        self.process = None
        return Row(name, asked.schedule or "", "other", detail, self.limit)

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.rows = 0

    def stop(self) -> None:
        if self.process is not None:
            self.connection.send(None)
            self.process.join(20)
            self.process.kill()
            self.process = None


def run_all(
    names: Sequence[str], asked: Asked, jobs: int, limit: float
) -> Iterator[Row]:
    """Rows as they come."""
    waiting: Queue[str] = Queue()
    for name in names:
        waiting.put(name)
    rows: Queue[Row] = Queue()

    def work() -> None:
        slot = Slot(limit)
        for name in iter(lambda: None if waiting.empty() else waiting.get(), None):
            rows.put(slot.run(name, asked))
        slot.stop()

    targets: list[Callable[[], None]] = [work] * max(1, min(jobs, len(names)))
    for target in targets:
        threading.Thread(target=target, daemon=True).start()
    for _ in names:
        yield rows.get()
