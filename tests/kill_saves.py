"""Ranks killed in the middle of a save: the last whole checkpoint always loads.

python -m tests.kill_saves --runs 50

Each run forks two ranks, which own half of a model each and save it again and again
into one folder, and kills one or both at a random moment. What loads then must be one
save's, the last that was reported or the one after it. The next run goes on beside what
was left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fxsched
from fxsched.ir.graphs import Spec
from fxsched.params.record import note

RANKS = 2
PATIENCE = 20.0  # seconds in which a rank must end that lost the other


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Gives all values of a training state this number."""
    for parameter in model.parameters():
        parameter.data.fill_(number)
        momentum = torch.full_like(parameter, number)
        optimizer.state[parameter]["momentum_buffer"] = momentum


def save_forever(
    rank: int, port: int, folder: Path, first: int, reports: int, background: bool
) -> None:
    """What a rank does until it is killed; it reports each whole save."""
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model, optimizer = build()
    for i, layer in enumerate(model.children()):
        for parameter in layer.parameters():
            note(parameter, owners=(i,), spec=Spec.of(parameter))
    number = first
    while True:
        fill(model, optimizer, number)
        extra = {"number": number}
        if background:
            saving = fxsched.save(
                folder, model, optimizer, None, extra, background=True
            )
            fill(model, optimizer, -1)  # what comes next is not saved
            saving.wait()
        else:
            fxsched.save(folder, model, optimizer, None, extra)
        os.write(reports, number.to_bytes(4, "big"))
        number += 1


def fork(*args: object) -> int:
    """A process that runs save_forever."""
    child = os.fork()
    if child == 0:
        try:
            save_forever(*args)  # type: ignore[arg-type]
        except BaseException as error:
            print(f"  a rank ended: {str(error).splitlines()[0][:150]}", flush=True)
        finally:
            os._exit(1)
    return child


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def ended(children: list[int]) -> None:
    """Waits for processes; those that don't end in time are an error."""
    until = time.monotonic() + PATIENCE
    waiting = list(children)
    while waiting and time.monotonic() < until:
        waiting = [child for child in waiting if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for child in waiting:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not waiting, f"{len(waiting)} ranks hang without the one that was killed"


def killed(folder: Path, first: int, draw: random.Random) -> int:
    """Starts ranks and kills some; the number of the last whole save reported."""
    reader, writer = os.pipe()
    port = free_port()
    background = draw.random() < 0.5
    children = [
        fork(rank, port, folder, first, writer, background) for rank in range(RANKS)
    ]
    os.close(writer)
    with os.fdopen(reader, "rb") as reports:
        last = int.from_bytes(reports.read(4), "big")  # the first save is whole
        time.sleep(draw.random() * 0.3)
        victims = draw.choice([[0], [1], [0, 1]])
        for rank in victims:
            os.kill(children[rank], signal.SIGKILL)
        ended(children)
        data = reports.read()
    numbers = [data[i : i + 4] for i in range(0, len(data), 4)]
    return max([last, *(int.from_bytes(each, "big") for each in numbers)])


def loaded(folder: Path) -> int:
    """The number of the save that loads, all of whose values have it."""
    model, optimizer = build()
    number = fxsched.load(folder, model, optimizer)["number"]
    for parameter in model.parameters():
        for value in (parameter, optimizer.state[parameter]["momentum_buffer"]):
            assert bool((value == number).all()), f"save {number} has another's values"
    assert isinstance(number, int)
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, number = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(options.runs):
            reported = killed(folder, number + 1, draw)
            number = loaded(folder)
            assert number in (reported, reported + 1), (number, reported)
        cut = sum(not (each / "manifest.json").exists() for each in folder.glob("0*"))
    print(f"killed {options.runs} times, {cut} left half a checkpoint: all loaded")


if __name__ == "__main__":
    main()
