"""Has activations wait for B where the schedule says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ...ir import ops
from ...ir.joint import is_whole
from ...ir.meta import of_call
from ...ir.request import Request
from ...ir.step import OFFLOADS, RELOADS, Credit, JobOutput, Op, Step, replace_values
from ...jobs.job import Direction, Job, PlanError

Place = int | str


def place_saved(step: Step, request: Request) -> Step:
    """Ops that put what F saves elsewhere, and bring it back before B.

    before: 0F0                                                      # worker 0
            0F1                                                      # worker 0
            0B0, saved_0_0                                           # worker 0
    after:  0F0                                                      # worker 0
            offloaded_saved_0_0 = offload(1, saved_0_0)              # worker 1
            reloaded_saved_0_0 = reload(offloaded_saved_0_0)         # worker 1
            0F1                                                      # worker 0
            0B0, reloaded_saved_0_0                                  # worker 0

    Of what B (or W) reads, this is all that F of its microbatch make: what its own F
    saves, and values of other stages. It comes back request.ahead jobs of B's worker
    before B (here 1). Where that is no later than F, it stays where it is. With
    order="dynamic" it comes back after the job before these.
    Other workers are handed values, and send them back, beside their jobs.
    """
    return _Placing(step, request).run() if step.jobs.saved else step


class _Placing:
    def __init__(self, step: Step, request: Request) -> None:
        self.step, self.request = step, request
        self.lines = list(step.ops)
        self.before: dict[int, list[Op]] = {}  # new ops, by the line after them
        self.after: dict[int, list[Op]] = {}
        self.offloaded: dict[tuple[JobOutput, int, Place], Op] = {}
        self.forward: dict[Job, int] = {}  # places of F
        self.own: dict[int, list[int]] = {}  # places of each worker's jobs
        self.begin = 0  # of the lines since the pause

    def run(self) -> Step:
        for place, op in enumerate(self.lines):
            if op.target is ops.pause:
                self.begin = place + 1
            if op.job is None:
                continue
            if op.job.direction is Direction.FORWARD:
                self.forward[op.job] = place
            elif op.job.direction is not Direction.UPDATE:
                self._reload(op, op.job, place)
            self.own.setdefault(op.worker, []).append(place)
        lines = [
            line
            for place, op in enumerate(self.lines)
            for line in (*self.before.get(place, ()), op, *self.after.get(place, ()))
        ]
        return replace(self.step, lines=lines)

    def _reload(self, op: Op, job: Job, place: int) -> None:
        """Has a B or W read what comes back."""
        forward = job._replace(direction=Direction.FORWARD)
        where = self.step.jobs.saved.get(self.step.jobs.number(forward))
        if where is None:
            return
        made = self.forward[forward]
        earlier = [i for i in self.own.get(op.worker, ()) if i >= self.begin]
        ahead = earlier[len(earlier) - self.request.ahead :] or [place]
        if len(earlier) < self.request.ahead:
            ahead = [*earlier, place]
        start, new = ahead[0], dict[JobOutput, Op]()
        if start <= made or {where, op.worker} == {self.lines[made].worker}:
            return
        for value in self._read(op, job):
            handle = self._offload(value, where, forward)
            name = f"reloaded_{value}"
            new[value] = again = Op(
                handle.worker, f"reload {job}", op.n, ops.reload, (handle,), name=name
            )
            again.specs, again.seconds = handle.specs, handle.seconds
            again.aside = RELOADS * self._aside(value)
            before = [i for i in earlier if made < i < start]
            if self.request.order == "dynamic" and before:
                last = self.lines[before[-1]].job
                assert last is not None
                again.after = (Credit(last),)
            self.before.setdefault(start, []).append(again)
        replace_values(op, new)

    def _read(self, op: Op, job: Job) -> Iterator[JobOutput]:
        """What a job reads of F."""
        step = self.step
        kind = step.jobs.at[job.stage, job.direction]
        direct = set[fx.Node](step.recipes[kind].call.all_input_nodes)
        for node, value in zip(step.reads[kind], op.args[1], strict=True):
            if isinstance(value, JobOutput) and node in direct and not is_whole(node):
                _, direction = step.jobs.kinds[step.maker[value.node]]
                if direction is Direction.FORWARD:
                    yield value

    def _offload(self, value: JobOutput, where: Place, forward: Job) -> Op:
        """What puts a value away, after F; once, though several read it."""
        f = self.lines[self.forward[forward]]
        worker = where if isinstance(where, int) else f.worker
        key = value, worker, where
        if key not in self.offloaded:
            specs, known = self.step.specs(value)[0], of_call(value.node)
            device = getattr(specs[0], "device", None) if specs else None
            if where == "host" and device is not None and device.type == "cpu":
                raise PlanError(
                    f"w({forward}) saves what B reads on 'host', whose memory the "
                    "model is in; give another worker, 'disk' or None"
                )
            args = where, known.get("lent", ()), value
            new = Op(worker, f"offload {forward}", f.n, ops.offload, args, specs)
            new.name = f"offloaded_{value}"
            rate = self.step.facts.parking.get(str(where))
            new.seconds = parked_bytes(value, self.step) / rate if rate else 0.0
            new.aside = OFFLOADS * (worker != f.worker and self._aside(value))
            self.after.setdefault(self.forward[forward], []).append(new)
            self.offloaded[key] = new
        return self.offloaded[key]

    def _aside(self, value: JobOutput) -> bool:
        """Whether a value moves beside the jobs: not where one thread sends, nor where
        a device does what it is told one after the other."""
        specs, _ = self.step.specs(value)
        devices = {spec.device.type for spec in specs if hasattr(spec, "device")}
        return not self.request.ordered and devices <= {"cpu"}


def parked_bytes(value: JobOutput, step: Step) -> float:
    """Bytes of memory that a value takes elsewhere."""
    known = of_call(value.node)
    size: float = sum(spec.bytes for spec in step.specs(value)[0])
    return known.get("held", size) if known.get("bundle") else size
