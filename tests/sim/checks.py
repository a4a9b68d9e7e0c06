"""What the library's runs don't show: python -m tests.sim.checks CHECK .."""

from __future__ import annotations

import sys
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

import fxsched
from fxsched import schedules
from fxsched.ir.meta import of_call
from fxsched.runtime.run import Run
from fxsched.transport import ordered
from tests.cases import assert_equal

from . import device, queues
from .__main__ import eager, library, linear, made, moved, trained
from .device import DEVICE
from .run import simulated


def stream() -> None:
    """Threads launch to the stream that is present where the model is called."""
    model, (x,) = linear()
    model, x, own = moved(model), x.to(DEVICE), queues.Stream()
    seen, advance = set(), Run.advance

    def noted(self: Run, tangents: object = None) -> object:
        seen.add(queues.current_stream())
        return advance(self, tangents)

    with (
        mock.patch.object(Run, "advance", noted),
        queues.on_stream(own),
        fxsched.backend(schedules.gpipe(2, 2)) as backend,
    ):
        torch.compile(model, backend=backend)(x).backward()
    assert seen == {own}
    print("threads launch to the caller's stream")


def timeline() -> None:
    """Times of jobs are those at which the device comes to them."""
    model, (x,) = linear()
    with (
        simulated(),
        fxsched.backend(
            schedules.one_f_one_b(2, 4), transport="strict", profile=True
        ) as backend,
    ):
        torch.compile(moved(model), backend=backend)(x.to(DEVICE)).backward()
        events = {(str(e.job), e.worker): e for e in backend.timeline}
        assert len(events) == len(backend.plan.jobs)
    for stage, b in ((0, 0), (0, 3)):  # F of the next stage waits for it on the device
        sender, receiver = events[f"{stage}F{b}", 0], events[f"{stage + 1}F{b}", 1]
        assert sender.end <= receiver.end
    assert all(each.start <= each.end for each in events.values())
    print("times are the device's")


def host() -> None:
    """No value of a plan is on the CPU, but credits, which have no bytes."""
    for name in ("1f1b", "fsdp", "zb_v", "ddp"):
        torch._dynamo.reset()
        model, inputs = made("gpt")
        with (
            simulated(),
            fxsched.backend(library(name, 2), transport="strict") as backend,
        ):
            compiled = torch.compile(moved(model), backend=backend)
            compiled(*(each.to(DEVICE) for each in inputs)).backward()
        specs = [
            spec
            for program in backend.plan.programs
            for node in program.graph.nodes
            for spec in of_call(node).get("specs", ())
        ]
        kinds = {spec.device.type for spec in specs if spec.bytes}
        assert kinds == {"sim"}, (name, kinds)
    print("no value of a plan is on the CPU")


def memory() -> None:
    """A step holds what plan.memory says, and what a job needs while it runs, though no
    transfer is done before the whole step is launched."""
    for name in ("1f1b", "gpipe", "fsdp", "zb_v"):
        torch._dynamo.reset()
        model, inputs = made("gpt")
        with (
            mock.patch.object(ordered, "BYTES", 1 << 10),
            simulated(),
            fxsched.backend(library(name, 2), transport="strict") as backend,
        ):
            compiled = torch.compile(moved(model), backend=backend)
            given = [each.to(DEVICE) for each in inputs]
            compiled(*given).backward()
            device.memory.restart()
            compiled(*given).backward()
        for worker, peaks in enumerate(backend.plan.memory):
            planned = peaks.at_once.total - peaks.at_once.weights
            peak = device.memory.peak[worker]
            assert planned <= peak <= 1.3 * planned, (name, worker, planned, peak)
    print("memory as planned")


def parked() -> None:
    """Activations wait on the host, on disk or on the other worker."""
    wanted = eager("gpt", 4, 2)
    for where in ("host", "disk", 0):
        schedule = schedules.parked(schedules.gpipe(2, 4), where)
        found, _ = trained("gpt", schedule, 2)
        assert_equal(found, wanted)
    print("parked activations come back")


def graphs() -> None:
    """Stages that are captured as graphs train as eager PyTorch does, with the bits of
    stages that aren't, also when their weights move."""
    for number, name in enumerate(("1f1b", "fsdp", "interleaved", "zb_v")):
        schedule, odd = library(name, 2), bool(number % 2)
        plain, _ = trained("gpt", schedule, 2, late=odd)
        device.Graph.replays = 0
        options = {"late": odd, "moves": not odd, "capture": "graphs"}
        found, _ = trained("gpt", schedule, 2, **options)
        jobs = len(fxsched.simulate(schedule).timeline)
        assert device.Graph.replays > jobs, (device.Graph.replays, jobs)
        assert_equal(found, eager("gpt", schedule.microbatches, 2))
        for kind, wanted in vars(plain).items():
            same = tree_map(torch.equal, vars(found)[kind], wanted)
            assert all(tree_leaves(same)), (name, kind)
    print("graphs give the same bits")


if __name__ == "__main__":
    for check in sys.argv[1:]:
        globals()[check]()
