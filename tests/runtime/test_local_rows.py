"""Ranks that load only the rows that they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxsched
from fxsched import LocalSampler, PlanError, Schedule, schedules
from tests.started_ranks import run_ranks


@pytest.mark.parametrize(
    ("schedule", "rank", "rows"),
    [
        (schedules.ddp(4), 1, [2, 3]),
        (schedules.ddp(2, 4), 1, [2, 3, 6, 7]),
        (schedules.gpipe(2, 4), 1, list(range(8))),
        (schedules.graph(2, 4), 0, list(range(8))),
        (schedules.replicate(schedules.gpipe(2, 2), 2), 2, [2, 3, 6, 7]),
        (schedules.lpp(4, 2, 4), 0, [0, 1, 4, 5]),
        (schedules.parameter_server(3, 2), 2, []),
    ],
    ids=lambda each: each.name if isinstance(each, Schedule) else None,
)
def test_rows_of_the_microbatches_that_a_worker_runs_jobs_of(
    schedule: Schedule, rank: int, rows: list[int]
) -> None:
    assert schedule.local_rows(rank, 8) == rows


def test_rows_of_a_b_that_runs_elsewhere() -> None:
    """B reads the batch again."""
    way = Schedule(2, 2, 1, w=lambda s, b, d: (0, b if d == "F" else 1 - b))
    assert way.local_rows(0, 2) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 8), r"rank 4: give a worker, 0\.\.3"),
        ((0, 6), r"local_rows\(batch=6\): give a multiple of the 4 microbatches"),
    ],
)
def test_rows_that_there_are_not(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        schedules.ddp(4).local_rows(*arguments)


def test_the_ranks_samplers_divide_each_batch_of_each_epoch() -> None:
    schedule = schedules.ddp(2, 4)
    ranks = [LocalSampler(range(20), schedule, 8, rank) for rank in range(2)]
    whole = LocalSampler(range(20), schedule, 8)  # one process runs all workers
    epochs = []
    for epoch in range(2):
        for each in (*ranks, whole):
            each.set_epoch(epoch)
        assert [len(each) for each in ranks] == [2, 2]
        for one, other, rows in zip(*ranks, whole, strict=True):
            for rank, own in enumerate((one, other)):
                assert own == [rows[i] for i in schedule.local_rows(rank, 8)]
        epochs.append(list(whole))
    assert epochs[0] != epochs[1]
    seen = [row for rows in epochs[0] for row in rows]
    assert len(set(seen)) == len(seen) == 16
    plain = LocalSampler(range(20), schedule, 8, 1, shuffle=False)
    assert list(plain) == [[2, 3, 6, 7], [10, 11, 14, 15]]


def test_samplers_of_what_there_is_not() -> None:
    with pytest.raises(
        PlanError, match=r"LocalSampler\(rank=2\): give a worker, 0\.\.1"
    ):
        LocalSampler(range(20), schedules.ddp(2), 8, 2)
    with pytest.raises(PlanError, match="the dataset has 6 samples, which make no wh"):
        LocalSampler(range(6), schedules.ddp(2), 8)


@pytest.mark.parametrize(
    "options",
    [{"ragged": "fewer"}, {"input_from": 0}, {"loss_reduction": "weighted"}],
)
def test_what_needs_the_whole_batch_does_not_go_with_it(
    options: dict[str, Any],
) -> None:
    with pytest.raises(PlanError, match=r"rows='local'\) doesn't go with ragged="):
        fxsched.backend(schedules.ddp(2), rows="local", **options)
    with pytest.raises(PlanError, match=r"backend\(rows='some'\)"):
        fxsched.backend(schedules.ddp(2), rows="some")


def test_in_one_process_it_is_the_whole_batch() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
    backend = fxsched.backend(schedules.ddp(2, 4), rows="local")
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))


@pytest.mark.slow
def test_ranks_with_rows_of_their_own_train_as_with_all() -> None:
    run_ranks(2, "tests.ranks_local")
