"""Faults at random moments on ranks: `python -m tests.inject --runs 20`.

Each run starts ranks of a random schedule, transport and order, and then one of them is
killed, stopped (SIGSTOP), or has an exception in a task of its program, picked by a
pass. All others must end by themselves, in time, each with an error that names that
rank; under an exception also the task. No process may stay. The flight records that
they leave must blame it too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import fxsched
from fxsched import Schedule, schedules
from fxsched.ir import ops
from fxsched.runtime.blame import blame
from fxsched.runtime.record import read_records
from tests.torchrun import ONE_THREAD, ROOT

TIMEOUT = 3.0  # seconds, of the backends
SLACK = 6.0  # seconds that a busy machine may take longer
START = 120.0  # seconds
SCHEDULES = ("1f1b", "ddp", "fsdp", "zb_h1", "gpipe")
FAULTS = ("kill", "stop", "exception")


class Case(NamedTuple):
    """A run: who fails, how, and where."""

    ranks: int
    schedule: str
    transport: str
    order: str
    fault: str
    victim: int
    agent: bool  # whether the store is another process's, as torchrun's is
    seed: int

    def ends(self, rank: int) -> bool:
        """Whether a rank must end by itself, and say why."""
        return rank != self.victim or self.fault == "exception"

    @staticmethod
    def drawn(seed: int, fault: str | None = None) -> Case:
        """A random one."""
        draw = random.Random(seed)
        ranks = draw.choice((2, 3, 4))
        return Case(
            ranks,
            draw.choice(SCHEDULES),
            draw.choice(("distributed", "gloo")),
            draw.choice(("static", "dynamic")),
            fault or draw.choice(FAULTS),
            draw.randrange(ranks),
            draw.random() < 0.7,
            seed,
        )


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


class Fault(Exception):
    """What a rank's program is made to raise."""


class Bomb:
    """A pass that has a random task of one rank's program raise at a later call."""

    def __init__(self, case: Case) -> None:
        self.case, self.armed, self.task = case, False, ""

    def __call__(self, program: fx.GraphModule, request: Any) -> fx.GraphModule:
        if dist.get_rank() != self.case.victim:
            return program
        draw = random.Random(self.case.seed)
        pairs = [
            (node, read)
            for node in program.graph.nodes
            for read in node.all_input_nodes
            if "task" in node.meta and node.target is not ops.free
            if read.op == "call_function" and read.meta.get("bundle") is False
        ]
        node, read = draw.choice(pairs)
        with program.graph.inserting_before(node):
            new = program.graph.call_function(self.pass_on, (read,))
        fxsched.passes.replaces(new, read)
        node.replace_input_with(read, new)
        self.task = node.meta["task"]
        return program

    def pass_on(self, value: Any) -> Any:
        if self.armed:
            raise Fault("planted")
        return value


def train(case: Case, folder: str) -> None:
    """A rank: trains until it fails, and says how."""
    made = {
        "1f1b": lambda: schedules.one_f_one_b(case.ranks, 4),
        "ddp": lambda: schedules.ddp(case.ranks),
        "fsdp": lambda: schedules.fsdp(case.ranks),
        "zb_h1": lambda: schedules.zb_h1(case.ranks, 4),
        "gpipe": lambda: schedules.gpipe(case.ranks, 4),
    }
    schedule: Schedule = made[case.schedule]()
    bomb = Bomb(case)
    options: dict[str, Any] = {"transport": case.transport, "order": case.order}
    options["flight_record"] = folder
    passes = [bomb] if case.fault == "exception" else []
    backend = fxsched.backend(schedule, timeout=TIMEOUT, passes=passes, **options)
    model, x = Deep(), torch.randn(4 * case.ranks, 32)
    step = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for call in range(10**9):
        bomb.armed = call == 5 + case.seed % 7
        try:
            step(x).backward()
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            said = [time.time(), type(error).__name__, text, bomb.task]
            print(json.dumps(said), flush=True)
            sys.exit(3)
        optimizer.step()
        optimizer.zero_grad()
        if call == 3:
            print("ready", flush=True)


class Rank:
    """A process, and the lines that it prints."""

    def __init__(self, case: Case, rank: int, port: int, folder: str) -> None:
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(case.ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(case.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": str(case.agent),
            "TORCHELASTIC_RUN_ID": "inject",
        }
        command = sys.executable, "-m", "tests.inject"
        self.process = subprocess.Popen(
            [*command, "--as-rank", json.dumps(case), "--folder", folder],
            cwd=ROOT,
            env=os.environ | ONE_THREAD | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        pipes = (self.process.stdout, self.lines), (self.process.stderr, self.errors)
        for pipe, lines in pipes:
            threading.Thread(None, lines.extend, args=(pipe,), daemon=True).start()

    def said(self) -> list[Any] | None:
        """When it failed, and how."""
        lines = [line for line in self.lines if line.startswith("[")]
        return json.loads(lines[0]) if lines else None


def run(case: Case) -> list[str]:
    """What is wrong with how a run ended."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        if case.agent:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port, None, True, wait_for_workers=False
            )
            stack.callback(lambda: store)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ranks = [Rank(case, rank, port, folder) for rank in range(case.ranks)]
        stack.callback(end, ranks)
        began = time.monotonic()
        while not all("ready\n" in rank.lines for rank in ranks):
            time.sleep(0.05)
            late = time.monotonic() - began > START
            if late or all(rank.process.poll() is not None for rank in ranks):
                return [f"did not start: {r.said()} {r.errors[-3:]}" for r in ranks]
        fault = time.time()
        if case.fault != "exception":
            time.sleep(random.Random(case.seed).random() / 4)
            fault = time.time()
            number = signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP
            ranks[case.victim].process.send_signal(number)
        ending = [rank for i, rank in enumerate(ranks) if case.ends(i)]
        due = time.monotonic() + TIMEOUT + 3 * SLACK
        while time.monotonic() < due and any(r.process.poll() is None for r in ending):
            time.sleep(0.05)
        return [*wrong(case, ranks, fault), *blamed(case, ranks, Path(folder))]


def wrong(case: Case, ranks: list[Rank], fault: float) -> Iterator[str]:
    """What survivors did not say, or too late."""
    task = (ranks[case.victim].said() or [""])[-1]
    for i, rank in enumerate(ranks):
        if not case.ends(i):
            continue
        status, said = rank.process.poll(), rank.said()
        if said is None or status != 3:
            tail = " ".join(rank.errors[-3:])
            yield f"rank {i} ended with {status}, said {said} {tail}"
            continue
        when, kind, text, _ = said
        limit = TIMEOUT + SLACK if case.fault == "stop" else SLACK
        if case.fault != "exception" and when - fault > limit:
            yield f"rank {i} failed after {when - fault:.1f} s"
        if case.fault == "exception":
            names = "planted" in text and (i == case.victim or task in text)
        else:
            holder = not case.agent and case.victim == 0 and "the store" in text
            names = holder or re.search(named(case), text) is not None
        if not names:
            yield f"rank {i} blames another: {kind} {text}"


def blamed(case: Case, ranks: list[Rank], folder: Path) -> Iterator[str]:
    """What is wrong with what the flight records say."""
    text = blame(read_records(folder))
    first = text.split("\n")[0]
    if case.fault == "exception":
        task = (ranks[case.victim].said() or [""])[-1]
        due = f"rank {case.victim} failed first, in job {task} of call "
    else:
        due = f"rank {case.victim} went silent first; it left no record"
    if not first.startswith(due):
        yield f"the records blame another: {text}"
    elif f"-> rank {case.victim}, for " not in text and case.fault == "stop":
        yield f"the records have nobody wait for rank {case.victim}: {text}"


def named(case: Case) -> str:
    """How errors name the rank that failed."""
    if case.fault == "kill":
        return rf"lost rank {case.victim} at call"
    return rf"rank {case.victim} waits for nobody"


def end(ranks: list[Rank]) -> None:
    """Kills what is left of them."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signal.SIGCONT)
            rank.process.kill()
        rank.process.wait()


def free_port() -> int:
    """A port of this host that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.inject")
    parser.add_argument("--runs", type=int, default=20, help="(20)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (0)")
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        train(Case(*json.loads(options.as_rank)), options.folder)
        return 0
    failed = 0
    for seed in range(options.seed, options.seed + options.runs):
        case = Case.drawn(seed, options.fault)
        faults = run(case)
        failed += bool(faults)
        print(
            f"{'; '.join(map(str, case)):60}", *(faults or ["all named it"]), sep="\n  "
        )
    print(f"{options.runs - failed} of {options.runs} runs ended as they must")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
