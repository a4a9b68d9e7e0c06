"""This process as one worker of a torch.distributed job."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checker.check_messages import check_summaries
from ..checker.summary import Summary
from ..ir.graphs import Role, State
from ..ir.loss_scale import Gradients, overflowed
from ..ir.parts import KeptParts
from ..ir.request import Transport
from ..ir.step import Message
from ..jobs.job import PlanError
from ..params.averaged import share_averages
from ..params.clip import guard_clipping
from ..params.cut_weights import cut_weight, follow_cast
from ..params.lazy import forget, make, make_all, make_empty
from ..params.optimizer_steps import guard_optimizers
from ..params.record import Record, note, parts_of, record_of, spec_of
from ..params.released import give_up, stay_released, take_back
from ..params.scaler import share_overflows
from ..plans.arithmetic import first_difference
from ..plans.plan import Plan
from ..transport.device_groups import backend_of, check_backend
from ..transport.processes import BACKENDS, MESSAGES, Processes
from .run import Run
from .runnable import Runnable
from .threads import Inputs, Tangents

T = TypeVar("T")
Updated = tuple[str, Tensor, int | None]  # a tensor with its name, and who updates it


class Ranks:
    """This process as one worker of a torch.distributed job."""

    readers: tuple[int, ...] | None = None

    def __init__(
        self,
        workers: int,
        transport: Transport | None = None,
        timeout: float | None = None,
        share: bool = True,
    ) -> None:
        near = transport in (None, "distributed")
        self.transport, self.asked = transport, False  # by which device messages go
        self.processes = Processes(workers, near, timeout)
        BACKENDS.add(self.processes)
        self.rank = self.processes.rank
        self.here: Sequence[int] = (self.rank,)
        asked = "OMP_NUM_THREADS" in os.environ
        if share and not asked and torch.get_num_threads() > 1:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
            torch.set_num_threads(max(1, torch.get_num_threads() // local))

    def close(self) -> None:
        """Ends this rank's links, threads and group; who waits for it is told."""
        self.processes.close()

    def skips(self, gradients: Gradients) -> bool:
        """Whether gradients overflowed on some rank: the scalers of all ranks, each of
        which sees its own, are to skip the step together."""
        return any(self.processes.all(overflowed(gradients)))

    def differ(self, number: int) -> bool:
        """Whether a number is not the same on all ranks."""
        return len(set(self.processes.all(number))) > 1

    def first(self, number: int) -> int:
        """Rank 0's number."""
        shared = torch.tensor(number)
        self.processes.share(shared, 0, range(self.processes.workers))
        return int(shared)

    def follow(self, args: Sequence[Any], static: bool) -> None:
        """Has messages go from device to device if the first call's tensors are on one
        that can. Raises PlanError if they can't and transport="nccl".

        static: whether programs run in the planned order, which such messages need.
        """
        if self.asked or self.transport not in (None, "nccl"):
            return
        kinds = {a.device for a in args if isinstance(a, Tensor)}
        device = next((d for d in kinds if d.type != "cpu"), torch.device("cpu"))
        if self.transport is not None:
            check_backend(self.transport, device)
        self.asked = True
        if static and (backend := backend_of(device)) is not None:
            self.processes.go_by_device(device, backend)

    def call(self) -> None:
        """Counts a call of the backend. Raises PlanError after a failure."""
        self.processes.control.ready()
        self.processes.control.calls += 1
        self.processes.mark = None

    def start(self, programs: dict[int, Runnable], inputs: Inputs) -> list[Run]:
        """A run of this rank's program, begun."""
        (mine,) = programs.values()
        with self.guarded():
            endpoint = self.processes.endpoint_of_run()
        run = mine.begin(self.rank, inputs(self.rank, mine.program.gm), endpoint)
        reference = weakref.ref(run)  # the run holds the endpoint
        endpoint.where = lambda: run.where()[1] if (run := reference()) else ""
        return [run]

    def advance(self, runs: list[Run], tangents: Tangents) -> list[dict[str, Any]]:
        """Runs this rank up to its pause or end. What fails here is told to all."""
        self.processes.control.ready()
        with self.guarded():
            results = runs[0].advance(tangents)
        self.processes.control.finished += 1
        return [results]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Where what fails on this rank alone is told to all."""
        try:
            yield
        except BaseException as error:
            self.processes.fail(error)
            raise

    def meet(self, text: str) -> int:
        """Meets the other ranks to plan a call; the plan's number.

        text: what the call is, in the user's words. Raises PlanError if the others
        plan for something else, or don't plan.
        """
        control = self.processes.control
        with self.guarded():
            texts = control.plan(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise PlanError(
                    f"call {control.calls} is for {other} on rank {rank}, and for "
                    f"{texts[0]} on rank 0; every rank makes the same calls of the "
                    "model, with equal shapes, types and modes"
                )
        return control.plans

    def reset(self, loaded: bool) -> None:
        """Connects this rank with the others anew; all ranks call it."""
        self.processes.reset(loaded)

    def together(self) -> float:
        """The time, on the clock of this rank's events, when all ranks are here. One
        host has one clock; those of several differ."""
        times = self.processes.all(time.perf_counter())
        near = len(self.processes.neighbours) + 1 == len(times)
        return max(times) if near else time.perf_counter()

    def gather(self, events: list[T]) -> list[T]:
        """The events, or the like, of all workers."""
        return [event for of_rank in self.processes.all(events) for event in of_rank]

    def check(self, plan: Plan | Exception) -> None:
        """Each rank examines its own program; what all found is checked everywhere.

        plan: or what went wrong when it was made. Raises that; PlanError if the ranks
        made different plans, CheckError if the programs are not sound, and PlanError if
        another rank could not plan or write its own.
        """
        failed, summary, what = None, None, "write its program"
        identity: tuple[str, tuple[str, ...]]
        if isinstance(plan, Exception):
            failed, what, identity = plan, "plan this call", ("", ())
        else:
            identity = (plan.digest, plan.arithmetic.passes)
            try:
                summary = _examined(plan, self.rank)
            except Exception as error:  # said below; the others wait for this rank
                failed = error
        said = f"{what}: {type(failed).__name__}: {failed}" if failed else None
        identities, errors, summaries = zip(
            *self.processes.all((identity, said, summary)), strict=True
        )
        if failed is not None:
            raise failed
        for rank, why in enumerate(errors):
            if why is not None:
                raise PlanError(f"rank {rank} could not {why}")
        assert isinstance(plan, Plan)
        digests, passes_by_rank = zip(*identities, strict=True)
        wrong = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if wrong:
            raise self._departed(plan, wrong[0])
        check_summaries(summaries, plan.reference)
        for rank, other in enumerate(passes_by_rank):
            if other != passes_by_rank[0]:
                raise PlanError(
                    f"rank {rank} has passes={list(other)}, rank 0 has "
                    f"{list(passes_by_rank[0])}; give the same passes on every rank"
                )
        self.processes.open(plan.step.ways)

    def _departed(self, plan: Plan, rank: int) -> PlanError:
        """What a rank computes that rank 0 doesn't, or that it has other programs."""
        others = self.processes.all(plan.arithmetic)
        text = f"rank {rank} planned other programs than rank 0; "
        if others[rank].digest != others[0].digest:
            first, its = first_difference(others[0], others[rank])
            text += f"the first difference:\n  rank 0: {first}\n  rank {rank}: {its}\n"
        return PlanError(
            f"{text}build the same model and schedule, with the same options, and pass "
            "batches of the same shape on every rank"
        )

    def settle(self, plan: Plan, args: Sequence[Any]) -> bool:
        """Owners start from the first owner's values; other ranks give up storage.

        A parameter that this rank doesn't keep becomes one NaN, expanded to its shape.
        A buffer that others write stays as it was, but is given up as well, and so is a
        copy of what another rank updates in the user's loop.
        False, and nothing is done, if some are kept or updated elsewhere than the plan
        says.
        """
        for position, place in plan.kept_parts.items():
            follow_cast(args[position])
            known = record_of(args[position])
            if known.owners and not (known.parts and known.parts.place.allows(place)):
                return False
        new: dict[State, tuple[int, ...]] = {}
        stale = []
        updated: list[Updated] = []
        fresh = {output.state for output in plan.outputs}  # every rank gets them
        for group in plan.groups:
            here = self.rank in group.owners
            for state in group.state:
                if state.role is Role.SHARED:
                    make_all(args[state.input : state.input + 1])
                    continue
                if state.input in plan.parts:
                    continue
                tensor, needed = args[state.input], here or state.input in fresh
                record = record_of(tensor)
                if record.parts:
                    return False
                if not record.owners:
                    new[state] = group.owners
                elif record.owners != group.owners:
                    return False
                elif state.role is Role.PARAMETER and not needed:
                    stay_released(tensor)
                if group.updater is not None or record.updater is not None:
                    if record.updater not in (None, group.updater):
                        return False
                    updated.append((state.name, tensor, group.updater))
                if group.written and not needed and record.lacks is None:
                    stale.append((state.name, tensor))
        for state, owners in new.items():
            tensor = args[state.input]
            placed = {"owners": owners, "workers": self.processes.workers}
            record = note(tensor, name=state.name, spec=spec_of(tensor), **placed)
            self._settle(state, tensor, record)
        for turn, (position, states) in enumerate(plan.states_of_parts.items()):
            if record_of(args[position]).parts is None:
                place = plan.kept_parts[position]
                name = plan.weight_name(states[0])
                self._cut(name, args[position], states, place, turn)
        updated += self._updated_parts(plan, args)
        for name, tensor in stale:
            give_up(name, tensor, values=False)
        for name, tensor, updater in updated:
            self._update(name, tensor, updater, plan)
        return True

    def _updated_parts(self, plan: Plan, args: Sequence[Any]) -> list[Updated]:
        """Parts of weights that u names a worker for, and that one."""
        return [
            (state.name, part, updater)
            for position, states in plan.states_of_parts.items()
            for state, part, updater in zip(
                states,
                parts_of(args[position]).parts,
                plan.kept_parts[position].updaters,
                strict=True,
            )
            if updater is not None
        ]

    def _update(
        self, name: str, tensor: Tensor, updater: int | None, plan: Plan
    ) -> None:
        """Notes who updates a parameter, and whether the others' copies are behind."""
        before = record_of(tensor)
        behind = not plan.current and (plan.trains or before.behind)
        if (updater, behind) == (before.updater, before.behind):
            return
        record = note(tensor, updater=updater, behind=behind)
        assert updater is not None, "an updater stays"
        copied = self.rank in before.owners and self.rank != updater
        if before.behind and not behind:
            if copied:
                take_back(tensor)
            self.processes.share(tensor, updater, before.owners)
        elif behind and copied:
            give_up(name, tensor, values=False)
        self._guard(record)

    def _cut(
        self,
        name: str,
        weight: Tensor,
        states: Sequence[State],
        place: KeptParts,
        turn: int,
    ) -> None:
        """Leaves this rank its parts of a weight; all owners of a part start from the
        first one's."""
        workers = self.processes.workers
        parts = cut_weight(name, weight, place, self.rank, workers, turn)
        for state, part in zip(states, parts, strict=True):
            self._settle(state, part, record_of(part))
        self._guard()

    def _settle(self, state: State, tensor: Tensor, record: Record) -> None:
        buffer = state.role is Role.BUFFER
        readers = range(self.processes.workers) if buffer else record.owners
        if self.rank == record.owners[0]:
            make(tensor)
        elif self.rank in readers:
            make_empty(tensor)
        else:
            forget(tensor)
        self.processes.share(tensor, record.owners[0], readers)
        if not buffer and self.rank not in record.owners:
            give_up(state.name, tensor)
        self._guard(record)

    def _guard(self, record: Record | None = None) -> None:
        """Guards what sees this rank's gradients alone, of a tensor or of parts."""
        if record is None or len(record.updaters) < self.processes.workers:
            guard_clipping()
            guard_optimizers(self.rank)
            share_averages()
            share_overflows()


def _examined(plan: Plan, rank: int) -> Summary:
    messages = sum(isinstance(line, Message) for line in plan.lines)
    if messages >= MESSAGES:
        raise PlanError(
            f"a step has {messages:,} messages, and ranks can send {MESSAGES - 1:,}; "
            "take fewer microbatches or stages"
        )
    return plan.examine(rank)
