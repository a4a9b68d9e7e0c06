"""Every mistake of the user's: what the error says, and where it points."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsched
from fxsched import PlanError, Schedule, schedules
from fxsched.torch_compat import tracebacks

from ..torchrun import ONE_THREAD, launcher


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.relu(self.encoder(x))).mean()


class Of(nn.Module):
    """A linear layer, then a function of its output and the input."""

    def __init__(self, then: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(3, 4), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.linear(x), x)


def run(
    model: Callable[..., Any],
    schedule: Schedule,
    batch: Tensor | None = None,
    **options: Any,
) -> Any:
    """One call of a compiled model on a batch, of four samples unless given."""
    x = torch.ones(4, 3) if batch is None else batch
    return torch.compile(model, backend=fxsched.backend(schedule, **options))(x)


def two(**changes: Any) -> Schedule:
    """Two workers, two microbatches, two stages, but for `changes`."""
    given = {"workers": 2, "microbatches": 2, "stages": 2, "w": lambda s, b, d: (s, s)}
    return Schedule(**(given | changes))


def number(text: str) -> int:
    """The number of the only line of this file with `text`."""
    lines = Path(__file__).read_text().split("\n")
    (found,) = (i for i, each in enumerate(lines, 1) if text in each)
    return found


# ------------------------------------------------------------------- the schedule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, r"Schedule\(workers=0\): give an int of 1 or more"),
        ({"workers": 2.0}, r"Schedule\(workers=2.0\): give an int of 1 or more"),
        ({"microbatches": 0}, r"Schedule\(microbatches=0\): give an int of 1 or"),
        ({"microbatches": True}, r"Schedule\(microbatches=True\): give an int"),
        ({"stages": 0}, r"Schedule\(stages=0\): give an int of 1 or more"),
        ({"in_flight": "2"}, r"Schedule\(in_flight='2'\): give None, an int of 1 or"),
        ({"in_flight": 0}, r"Schedule\(in_flight=0\): give None, an int of 1 or more"),
        ({"w": (0, 0)}, r"Schedule\(w=\(0, 0\)\): give a function of \(stage, micro"),
        ({"n": 3}, r"Schedule\(n=3\): give a function of \(stage, microbatch, dir"),
    ],
)
def test_a_schedule_names_the_argument_at_fault(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        two(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"w": lambda s, b, d: (4, 0)},
            r"w\(0F0\) puts its weights on worker 4, but workers are 0\.\.1",
        ),
        (
            {"w": lambda s, b, d: (0, -1)},
            r"w\(0F0\) runs on worker -1, but workers are 0\.\.1",
        ),
        (
            {"w": lambda s, b, d: s},
            r"w\(0F0\) returned 0; return Placement\(weights, compute\) or a pair",
        ),
        (
            {"w": lambda s, b, d: (0, 0, 0, 0)},
            r"w\(0F0\) returned \(0, 0, 0, 0\); return Placement",
        ),
        (
            {"w": lambda s, b, d: (0, 0, 2)},
            r"w\(0F0\) saves what B reads on 2; give None, one of the workers 0\.\.1, "
            "'host' or 'disk'",
        ),
        (
            {"w": lambda s, b, d: (0, 0, "tape")},
            r"w\(0F0\) saves what B reads on 'tape'; give None",
        ),
        (
            {"w": lambda s, b, d: (s, s, "host")},
            r"w\(1F0\) saves what B reads on 'host', whose memory the model is in",
        ),
        (
            {"w": lambda s, b, d: (0, 0.5)},
            r"w\(0F0\) runs on worker 0\.5; give an int",
        ),
        ({"n": lambda s, b, d: b / 2}, r"n\(0F0\) returned 0\.0; return an int"),
        ({"n": lambda s, b, d: None}, r"n\(0F0\) returned None; return an int"),
        (
            {"in_flight": lambda s: "1"},
            r"in_flight\(0\) returned '1'; return None or an int",
        ),
    ],
)
def test_w_n_and_in_flight_are_checked_job_by_job(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        run(Chain(), two(**changes))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)
        self.head = nn.Bilinear(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x), self.b(x)).mean()


def crossing(in_flight: Any) -> Schedule:
    """Two branches that take the microbatches in opposite orders, then join."""

    def n(s: int, b: int, d: fxsched.Direction) -> int:
        return -b if s == 1 else b

    return two(stages=3, w=lambda s, b, d: (s % 2, s % 2), n=n, in_flight=in_flight)


BRANCHES = ["b", "head"]


def test_a_cap_that_cannot_progress_names_the_smallest_that_works() -> None:
    message = (
        r"in_flight stops the schedule: 1F0 waits for room on its worker, which allows "
        r"1 microbatches of stage 1 between F and B, and no B can run; the smallest "
        r"that works is 2"
    )
    with pytest.raises(PlanError, match=message):
        run(Join(), crossing(1), stages=BRANCHES)
    run(Join(), crossing(2), stages=BRANCHES)


def test_an_order_against_data_flow_says_so() -> None:
    late_first = two(
        in_order=True, n=lambda s, b, d: -b if s else b + 10 * (d.value == "B")
    )
    run(Chain(), late_first)  # worker 1 waits for the last microbatch
    backward_first = two(in_order=True, n=lambda s, b, d: 10 * (d.value == "F"))
    message = r"in_order stops the schedule: 0F0 is ready, but its worker waits for a"
    with pytest.raises(PlanError, match=message):
        run(Chain(), backward_first)


def test_a_cap_against_a_strict_order_names_the_job_that_waits() -> None:
    order = two(
        microbatches=4,
        in_order=True,
        n=lambda s, b, d: 100 * (d.value == "B") + 10 * b + s,
        in_flight=lambda s: 2 if s == 1 else None,
    )
    message = r"1F2 waits for room on its worker, .* and B comes after it in the order"
    with pytest.raises(PlanError, match=message):
        run(Chain(), order)


def test_a_cap_by_stage_that_cannot_progress_says_how_much_larger() -> None:
    message = (
        r"in_flight stops the schedule: 1F0 waits for room on its worker, which allows "
        r"0 microbatches of stage 1 between F and B, and no B can run; one that is "
        r"larger by 1 for every stage works"
    )
    with pytest.raises(PlanError, match=message):
        run(Chain(), two(in_flight=lambda s: 1 - s))
    run(Chain(), two(in_flight=lambda s: 2 - s))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.ddp(4, 6), r"ddp\(workers=4, microbatches=6\): give micro"),
        (lambda: schedules.fsdp(4, 6), r"fsdp\(workers=4, microbatches=6\): give m"),
        (lambda: schedules.lpp(4, 3, 4), r"lpp\(workers=4, group_size=3\): .* divisor"),
        (lambda: schedules.fslpp(4, 0, 4), r"fslpp\(group_size=0\): give an int of 1"),
    ],
)
def test_a_library_schedule_names_the_argument_at_fault(
    make: Callable[[], Schedule], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        make()


# --------------------------------------------------------------------- the stages


def test_more_stages_than_the_model_can_be_cut_into() -> None:
    message = (
        r"the schedule wants 9 stages, but the model can be cut into 4 at most; "
        r"give a schedule of that many stages or fewer"
    )
    with pytest.raises(PlanError, match=message):
        run(Chain(), two(stages=9, w=lambda s, b, d: (0, 0)))


def test_a_module_that_does_not_exist_gets_near_names() -> None:
    message = r"stages names module 'decode', which .* did you mean decoder, encoder\?"
    with pytest.raises(PlanError, match=message):
        run(Chain(), two(), stages=["decode"])


def test_as_many_names_as_the_schedule_has_stages() -> None:
    message = (
        r"stages names 1 modules, which makes 2 stages, but the schedule has 3; name "
        r"as many as it has, where the first stage may start unnamed"
    )
    with pytest.raises(PlanError, match=message):
        run(Chain(), two(stages=3), stages=["decoder"])


def test_stages_as_one_string_is_not_taken_for_names() -> None:
    with pytest.raises(PlanError, match=r"backend\(stages='encoder'\): give 'auto'"):
        fxsched.backend(two(), stages="encoder")


# ---------------------------------------------------------------------- the batch


def test_a_batch_that_does_not_divide_into_microbatches() -> None:
    message = (
        r"input x has a batch of 5, which does not divide into 2 microbatches; pass a "
        r"multiple of 2, or take Schedule\(microbatches=1\)"
    )
    with pytest.raises(PlanError, match=message):
        run(Chain(), two(), torch.ones(5, 3))


def test_a_batch_size_that_the_model_fixes_shows_the_users_line() -> None:
    def then(made: Tensor, x: Tensor) -> Tensor:
        return made.view(16, 2, 2).mean()  # the fixed batch size

    message = (
        r"the batch size is fixed to 16 by\n.*made\.view\(16, 2, 2\).*"
        + rf"test_errors\.py:{number('the fixed batch' + ' size')} "
        + r"[\s\S]*take sizes from the input's shape \(x\.shape\[0\], or -1, not len"
    )
    with pytest.raises(PlanError, match=message):
        run(Of(then), two(), torch.ones(16, 3))


def test_a_model_without_a_tensor_input() -> None:
    message = (
        r"the model has no tensor input to cut into 2 microbatches; pass it the batch, "
        r"with samples along dimension 0"
    )
    linear = nn.Linear(3, 4)
    with pytest.raises(PlanError, match=message):
        run(lambda batch: linear.weight.mean(), two(stages=1))


def test_an_output_without_a_batch_dimension() -> None:
    message = (
        r"each microbatch computes a different value:\n  output 0, float32\[4\], made "
        r"[\s\S]*how to combine the values: backend\(outputs=\{0: 'mean'\}\)"
    )
    with pytest.raises(PlanError, match=message):
        run(Of(lambda made, x: made.amax(0)), two(), loss_reduction="mean")


# ------------------------------------------------------------------ the traceback


def frames_of(
    model: Callable[..., Tensor],
    kind: type[Exception] = PlanError,
    columns: int = 3,
) -> list[str]:
    """The files of fxsched and torch in the traceback of a call that fails, and "cause"
    if the error has one."""
    torch._dynamo.reset()
    with pytest.raises(kind) as caught:
        run(model, two(), torch.ones(3, columns))
    files = [
        Path(frame.f_code.co_filename)
        for frame, _ in walk_tb(caught.value.__traceback__)
    ]
    own = [file.stem for file in files if {"fxsched", "torch"} & set(file.parts)]
    return [*own, "cause"] if caught.value.__cause__ else own


def test_tracebacks_of_mistakes_have_the_frames_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    branches = Of(lambda made, x: made.sum() if made.sum() > 0 else x.sum())
    for model in (Chain(), branches):
        assert frames_of(model) == ["patched", "compiled_modules"]
        monkeypatch.setenv("FXSCHED_TRACEBACK", "full")
        assert len(frames_of(model)) > 10
        monkeypatch.delenv("FXSCHED_TRACEBACK")


def test_what_an_operation_raises_while_it_is_traced_is_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger(tracebacks.FAKES)
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(log, "handlers", [handler])
    model, broken = Chain(), Of(lambda made, x: (print(), made.sum())[1])
    assert frames_of(model, columns=7) == ["patched", "compiled_modules"]
    assert frames_of(broken, columns=7) == ["patched", "compiled_modules"]
    assert len(frames_of(lambda x: model(x).sum(), columns=7)) < 8
    assert not logged
    said = (
        r"^[^\n]*:\d+, in encoder: the model raised RuntimeError: .*7\] X \[3, \d\]"
        r".*size that may"
    )
    torch._dynamo.reset()
    with pytest.raises(PlanError, match=said):
        run(model, two(), torch.ones(4, 7))
    monkeypatch.setenv("FXSCHED_TRACEBACK", "full")
    assert frames_of(model, columns=7)[-1] == "cause" and logged


def test_a_key_that_the_batch_lacks_is_named() -> None:
    class Dependency(Chain):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch["x"]) + batch["rels"].mean()

    line = number('batch["rels' + '"]')
    said = rf":{line}: the model raised KeyError: 'rels'$"
    for _ in range(2):  # Dynamo names the key in two ways
        with pytest.raises(PlanError, match=said):
            fxsched.plan(Dependency(), two(), {"x": torch.ones(4, 3)})


def test_an_index_of_tuples_of_tensors_is_named_with_what_to_write() -> None:
    def tuples(made: Tensor, x: Tensor) -> Tensor:
        mask, index = torch.ones_like(made), torch.ones(3, 2, dtype=torch.int64)
        rows, columns = zip(*index, strict=True)
        mask[rows, columns] = 0
        return (made * mask).mean()

    def tensors(made: Tensor, x: Tensor) -> Tensor:
        mask, index = torch.ones_like(made), torch.ones(3, 2, dtype=torch.int64)
        mask[index[:, 0], index[:, 1]] = 0
        return (made * mask).mean()

    said = r":\d+: PyTorch can't trace this line, .* x\[index\[:, 0\], index\[:, 1\]\]$"
    with pytest.raises(PlanError, match=said):
        run(Of(tuples), two())
    torch._dynamo.reset()
    run(Of(tensors), two())


def test_torch_does_not_log_what_the_error_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger(tracebacks.SYMBOLS)
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(log, "handlers", [handler])
    branches = Of(lambda made, x: made.sum() if made.sum() > 0 else x.sum())
    for said in (False, True):
        with pytest.raises(PlanError, match="depends on the value of a tensor"):
            fxsched.compile(branches, two())(torch.ones(4, 3))
        assert bool(logged) is said
        monkeypatch.setenv("FXSCHED_TRACEBACK", "full")


def test_tracebacks_of_wrong_options_are_short() -> None:
    with pytest.raises(PlanError) as caught:
        fxsched.backend(two(), prefetch=-1)
    assert len(list(walk_tb(caught.value.__traceback__))) == 2


@pytest.mark.parametrize("kind", [TypeError, PlanError])
def test_tracebacks_of_bugs_are_whole(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        bug = TypeError("a bug")
        if kind is TypeError:
            raise bug
        raise PlanError("it cannot be planned") from bug

    monkeypatch.setattr(fxsched.Backend, "make", fails)
    frames = frames_of(Chain(), kind)
    assert "cause" in frames if kind is PlanError else len(frames) > 10


# ---------------------------------------------------------------------- the model


def test_a_graph_break_shows_the_users_line() -> None:
    linear = nn.Linear(3, 4)

    def breaks(x: Tensor) -> Tensor:
        print("breaks the graph")
        return linear(x).mean()

    line = number('print("breaks the' + ' graph")')
    message = (
        r"the model does not trace as one graph; it breaks at\n.*"
        + rf'{re.escape(__file__)}", line {line}'
        + r"[\s\S]*rewrite that line with torch operations, or move it out of the"
        + r".*; fxsched.compile\(model, schedule\) runs"
    )
    with pytest.raises(PlanError, match=message):
        run(breaks, two())


def test_an_input_that_the_model_writes_into_shows_the_users_line() -> None:
    def then(made: Tensor, x: Tensor) -> Tensor:
        x.mul_(2)
        return (made.sum() + x.sum()) / len(x)

    message = (
        r"the model writes into its input x, at\n.*"
        + rf"{re.escape(__file__)}:{number('x.mul_' + '(2)')}, "
        + r".*x\.mul_\(2\)\n.*write into a copy, or pass x.clone\(\) to the model in a"
    )
    with pytest.raises(PlanError, match=message):
        run(Of(then), two())

    class Around(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            return self.model(x.clone())

    run(Around(Of(then)), two())


def test_a_model_without_torch_operations_has_no_plan() -> None:
    with pytest.raises(PlanError, match="Dynamo made no graph of the model"):
        fxsched.plan(lambda x: 1, two(), torch.ones(4, 3))


# -------------------------------------------------------------------- the options


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"order": "random"}, r"backend\(order='random'\): give 'static' or 'dynamic'"),
        (
            {"carry": "all"},
            r"backend\(carry='all'\): give 'auto', 'saved', 'recompute'",
        ),
        (
            {"loss_reduction": "max"},
            r"\(loss_reduction='max'\): give 'exact', 'mean'",
        ),
        ({"stage_compiler": "c"}, r"stage_compiler='c'\): give 'eager' or 'inductor'"),
        ({"transport": "mpi"}, r"transport='mpi'\): give 'threads', 'dist"),
    ],
)
def test_an_unknown_option_lists_those_that_exist(
    option: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        fxsched.backend(two(), **option)


def test_a_backend_of_something_that_is_no_schedule() -> None:
    message = r"backend\(schedule='gpipe'\): give a Schedule, such as fxsched\.sched"
    with pytest.raises(PlanError, match=message):
        fxsched.backend("gpipe")  # type: ignore[arg-type]


def test_distributed_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    message = (
        r"transport='distributed' needs a process group: start with torchrun "
        r"--nproc-per-node 2, or call torch\.distributed\.init_process_group first"
    )
    with pytest.raises(PlanError, match=message):
        run(Chain(), two(), transport="distributed")


def test_a_world_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = r"the schedule has 2 workers, but torch.distributed runs 3 processes; st"
    with pytest.raises(PlanError, match=message):
        run(Chain(), two())


# -------------------------------------------------------------------- the training


AGAIN = r"backward\(\) a second time through one step; call the model again"


def test_a_second_backward_through_a_step_with_a_loss() -> None:
    loss = run(Chain(), two())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=AGAIN):
        loss.backward()


def test_a_second_backward_through_a_step_without_a_loss() -> None:
    rows = run(Of(lambda made, x: made), two(stages=1))
    rows.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=AGAIN):
        rows.sum().backward()


def test_a_gradient_into_logits_after_b_ran_in_the_call() -> None:
    loss, logits = run(Of(lambda made, x: (made.mean(), made)), two())
    message = (
        r"output 1 got a gradient, but B already ran in the call, from output 0, the "
        r"loss; compute all of the loss in the model, or return no scalar"
    )
    with pytest.raises(PlanError, match=message):
        (loss + logits.sum()).backward()


def test_an_error_of_the_models_own_names_the_job() -> None:
    def then(made: Tensor, x: Tensor) -> Tensor:
        return nn.functional.embedding(made.long() + 9, made.new_ones(4, 2)).mean()

    with pytest.raises(IndexError) as failure:
        run(Of(then), two(stages=1, w=lambda s, b, d: (0, 0)))
    place, rows = failure.value.__notes__
    where = "in job 0F0 (forward of stage 0, microbatch 0) on worker 0"
    assert place.startswith(f"fxsched: {where}\n  at {__file__}:")
    assert place.endswith(
        "in then: return nn.functional.embedding(made.long() + 9, made.new_ones(4, 2))"
        ".mean()"
    )
    assert rows.splitlines()[0] == "worker 0" and " 0F0 " in rows


def test_a_matrix_without_an_inverse_raises_as_in_eager() -> None:
    """torch.linalg.inv raises by an effect, which stages don't have."""

    def then(made: Tensor, x: Tensor) -> Tensor:
        square = made[:, :3, None] @ made[:, None, :3] * 0  # of rank 0
        return torch.linalg.inv(square).mean()

    with pytest.raises(torch.linalg.LinAlgError, match="is singular"):
        Of(then)(torch.ones(4, 3))
    with pytest.raises(torch.linalg.LinAlgError, match="is singular"):
        run(Of(then), two(stages=1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class BreaksInLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            print(end="")
        return x.mean()


def test_a_break_in_a_loop_does_not_plan_the_blocks_one_by_one() -> None:
    model = BreaksInLoop()
    message = r"breaks at\n.*in forward\n +print[\s\S]*fxsched.compile\(model, sched"
    with pytest.raises(PlanError, match=message):
        run(lambda x: model(x), two())


def test_inputs_that_could_each_be_the_batch() -> None:
    linear = nn.Linear(3, 3)

    def step(x: Tensor, table: Tensor) -> Tensor:
        return (linear(x) + table[x.argmax(1)]).mean()

    message = r"differ in length along dimension 0[\s\S]*x +\[4, 3\]\n +table +\[6, 3\]"
    with pytest.raises(PlanError, match=message):
        compiled = torch.compile(step, backend=fxsched.backend(two()))
        compiled(torch.ones(4, 3), torch.ones(6, 3))


@pytest.mark.parametrize("stages", [None, [3], []])
def test_stages_that_are_no_names(stages: object) -> None:
    with pytest.raises(PlanError, match=r"give 'auto' or a list of names of modules"):
        fxsched.backend(two(), stages=stages)


def test_counts_of_schedules() -> None:
    with pytest.raises(PlanError, match=r"fsdp\(workers=0\): give an int of 1 or more"):
        fxsched.schedules.fsdp(0, 4)
    with pytest.raises(PlanError, match=r"lpp\(group_size='2'\): give an int"):
        fxsched.schedules.lpp(4, "2", 4)


def test_a_pass_that_returns_nothing() -> None:
    backend = fxsched.backend(two(), passes=[lambda program, request: None])
    with pytest.raises(PlanError, match="must return each program that it is given"):
        torch.compile(Block(), backend=backend)(torch.ones(4, 3))


MISUSED = """
import os, signal, sys
import torch, fxsched
def train(kind, rank):
    schedule = fxsched.schedules.ddp(2, 2)
    if kind == "other":
        fxsched.backend(schedule, **{f"wrong_{rank}": 1})
    if kind == "last" and rank == 0:
        signal.pause()
    backend = fxsched.backend(schedule, transport="threads")
    torch.compile(torch.nn.Linear(4, 4), backend=backend)(torch.ones(5, 4))
train(sys.argv[1], int(os.environ["RANK"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "whole", "short"),
    [
        ("same", r"PlanError: input \S+ has a batch of 5", 1),
        ("other", r"TypeError: backend\(\) got .*'wrong_0'", 0),
        ("other", r"TypeError: backend\(\) got .*'wrong_1'", 0),
        ("last", r"PlanError: input \S+ has a batch of 5", 0),
    ],
)
def test_ranks_print_an_error_once(
    kind: str, whole: str, short: int, tmp_path: Path
) -> None:
    script = tmp_path / "misused.py"
    script.write_text(MISUSED)
    *python, _ = launcher(2)
    command = [*python, str(script), kind]
    env = os.environ | ONE_THREAD
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    said = ran.stderr
    assert len(re.findall(whole, said)) == 1, said
    assert said.count("arose on rank 1 as on rank 0") == short
    assert "fxsched/" not in said and "shortened" not in said
