"""Receives that are posted before they are taken, and what their buffers take."""

from __future__ import annotations

import pytest
import torch

import fxsched
from fxsched import Schedule, schedules
from fxsched.ir.step import Message, Op, Value, read
from fxsched.passes.step.place_receives import BYTES, WINDOW
from fxsched.runtime.runnable import Runnable

from .test_sums_in_pieces import STAGES, TWO_HOSTS, Net

ROWS = 2048  # of a microbatch, whose activations take 1 MiB


class Outputs(Net):
    """Without a loss, so that B runs in backward()."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def _plan(schedule: Schedule, network: fxsched.Network | None) -> fxsched.Plan:
    x = torch.randn(schedule.microbatches * ROWS, 128)
    return fxsched.plan(Net(), schedule, x, stages=STAGES, network=network)


@pytest.mark.parametrize("rows", [ROWS, 8])
def test_a_window_of_receives_is_posted_ahead(rows: int) -> None:
    x = torch.randn(16 * rows, 128)
    schedule = schedules.one_f_one_b(4, 16)
    step = fxsched.plan(Net(), schedule, x, stages=STAGES, network=TWO_HOSTS).step
    host, most = [0, 0, 1, 1], 0
    for worker in range(4):
        posted, taken = dict[Value, Message](), set[Value]()
        for line in step.lines:
            if isinstance(line, Op) and line.worker == worker:
                for message in step.posts.get(line, ()):
                    assert message.to == worker and message.value not in posted
                    assert host[message.source] != host[worker]
                    posted[message.value] = message
                taken.update(posted.keys() & set(read(line, worker)))
                coming = [m.bytes for v, m in posted.items() if v not in taken]
                coming = [size for size in coming if size > 4]  # no losses
                assert len(coming) <= WINDOW or sum(coming) <= BYTES
                most = max(most, len(coming))
        far = (m for m in step.lines if isinstance(m, Message) and m.to == worker)
        assert {m.value for m in far if host[m.source] != host[worker]} == set(posted)
    assert most == (WINDOW if rows == ROWS else 16)


def test_workers_that_share_memory_post_none() -> None:
    assert not _plan(schedules.one_f_one_b(4, 8), None).step.posts


@pytest.mark.parametrize("deferred", [False, True])
def test_a_program_posts_each_receive_once_and_before_it_takes_it(
    deferred: bool,
) -> None:
    schedule, model = schedules.one_f_one_b(4, 8), Outputs() if deferred else Net()
    x = torch.randn(8 * 8, 128)
    plan = fxsched.plan(model, schedule, x, stages=STAGES, network=TWO_HOSTS)
    assert plan.step.deferred is deferred
    for program in plan.programs:
        lines = [line for line, _ in Runnable(program, "static").code.source.lines]
        events = [
            (what, each.split(")")[0].split("(")[-1])
            for line in lines
            for what in ("expect", "take")
            for each in line.split("; ")
            if f"{what}(" in each
        ]
        for what in ("expect", "take"):
            names = [name for each, name in events if each == what]
            assert len(names) == len(set(names))
        waiting = set()
        for what, name in events:
            if what == "expect":
                waiting.add(name)
            else:
                waiting.remove(name)
        assert not waiting


def test_memory_has_the_buffers_of_posted_receives() -> None:
    schedule = schedules.one_f_one_b(4, 8)
    near, apart = (_plan(schedule, network) for network in (None, TWO_HOSTS))
    more = [
        after.at_once.activations - before.at_once.activations
        for before, after in zip(near.memory, apart.memory, strict=True)
    ]
    assert min(more) >= 0 and 2**20 <= more[2] <= WINDOW * 2**20
