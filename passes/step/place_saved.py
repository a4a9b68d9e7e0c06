"""Has activations wait for B where the schedule says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...ir import ops
from ...ir.joint import is_whole
from ...ir.meta import of_call
from ...ir.request import Request
from ...ir.step import OFFLOADS, RELOADS, Credit, JobOutput, Op, Step, replace_values
from ...jobs.job import Direction, Job, PlanError


def place_saved(step: Step, request: Request) -> Step:
    """Ops that put what F saves elsewhere, and bring it back before B.

    before: 0F0, 0F1, 0F2                                            # worker 0
            0B0, saved_0_0                                           # worker 0
    after:  0F0                                                      # worker 0
            offloaded_saved_0_0 = offload(1, saved_0_0)              # worker 1
            0F1                                                      # worker 0
            reloaded_saved_0_0 = reload(offloaded_saved_0_0)         # worker 1
            0F2                                                      # worker 0
            0B0, reloaded_saved_0_0                                  # worker 0

    Of what B reads this is all that F make: what its own F saves, and values of other
    stages. It comes back request.ahead jobs of B's worker before B (here 1); with
    order="dynamic", not before the job that comes before these. Where no job of that
    worker comes between F and this, it stays. Other workers take it, and send it back,
    beside their jobs.
    """
    return _Placing(step, request).run() if step.jobs.saved else step


class _Placing:
    def __init__(self, step: Step, request: Request) -> None:
        self.step, self.request, self.lines = step, request, list(step.ops)
        self.before: dict[int, list[Op]] = {}  # reloads, by the line after them
        self.places: dict[Op, int] = {}  # of the F that offloads come after
        self.offloaded: dict[tuple[JobOutput, int, int | str], Op] = {}
        self.forward: dict[Job, int] = {}  # places of F
        self.own: dict[int, list[int]] = {}  # of each worker's jobs since the pause

    def run(self) -> Step:
        for place, op in enumerate(self.lines):
            if op.target is ops.pause:
                self.own.clear()
            if op.job is None:
                continue
            if op.job.direction is Direction.FORWARD:
                self.forward[op.job] = place
            elif op.job.direction is not Direction.UPDATE:
                self._reload(op, op.job, place)
            self.own.setdefault(op.worker, []).append(place)
        before, after = self.before, dict[int, list[Op]]()
        for new, place in self.places.items():
            after.setdefault(place, []).append(new)
            new.task, new.n = f"offload {self.lines[place].job}", self.lines[place].n
        lines = [
            line
            for place, op in enumerate(self.lines)
            for line in (*before.get(place, ()), op, *after.get(place, ()))
        ]
        return replace(self.step, lines=lines)

    def _reload(self, op: Op, job: Job, place: int) -> None:
        """Has a B or W read what comes back."""
        job = job._replace(direction=Direction.FORWARD)
        where = self.step.jobs.saved.get(self.step.jobs.number(job))
        devices = {d for value in self._read(op) for d in self._devices(value)}
        if where == "host" and "cpu" in devices:
            raise PlanError(
                f"w({job}) saves what B reads on 'host', whose memory the model is in; "
                "give another worker, 'disk' or None"
            )
        own = [*self.own.get(op.worker, ()), place]
        turn, made = len(own) - 1 - self.request.ahead, self.forward[job]
        here = {where, op.worker} == {self.lines[made].worker}
        if where is None or here or turn < 1 or own[turn - 1] <= made:
            return
        last, new = self.lines[own[turn - 1]].job, dict[JobOutput, Op]()
        assert last is not None, "places of jobs"
        for value in self._read(op):
            handle = self._offload(value, where, job)
            task, name = f"reload {op.job}", f"reloaded_{value}"
            new[value] = again = replace(
                handle, task=task, n=op.n, target=ops.reload, args=(handle,), name=name
            )
            again.aside = RELOADS * self._aside(value)
            if self.request.order == "dynamic":
                again.after = (Credit(last),)
            self.before.setdefault(own[turn], []).append(again)
        replace_values(op, new)

    def _read(self, op: Op) -> Iterator[JobOutput]:
        """What a job reads of F."""
        assert op.job is not None, "only jobs do"
        kinds, maker = self.step.jobs.kinds, self.step.maker
        kind = self.step.jobs.at[op.job.stage, op.job.direction]
        direct = self.step.recipes[kind].call.all_input_nodes
        for node, value in zip(self.step.reads[kind], op.args[1], strict=True):
            if not isinstance(value, JobOutput) or is_whole(node):
                continue
            _, direction = kinds[maker[value.node]]
            if node in direct and direction is Direction.FORWARD:
                yield value

    def _offload(self, value: JobOutput, where: int | str, job: Job) -> Op:
        """What puts a value away; once, after the first F of those whose B read it."""
        forward = self.lines[self.forward[job]]
        worker = where if isinstance(where, int) else forward.worker
        known = self.offloaded.get((value, worker, where))
        if known is not None:
            self.places[known] = min(self.places[known], self.forward[job])
            return known
        args = where, of_call(value.node).get("lent", ()), value
        specs, name = self.step.specs(value)[0], f"offloaded_{value}"
        at = worker, f"offload {job}", forward.n
        new = Op(*at, ops.offload, args, specs, name)
        if rate := self.step.facts.parking.get(str(where)):
            new.seconds = parked_bytes(value, self.step) / rate
        new.aside = OFFLOADS * (worker != forward.worker and self._aside(value))
        self.places[new] = self.forward[job]
        self.offloaded[value, worker, where] = new
        return new

    def _devices(self, value: JobOutput) -> set[str]:
        """The types of devices of a value; none on paper."""
        specs, _ = self.step.specs(value)
        return {spec.device.type for spec in specs if hasattr(spec, "device")}

    def _aside(self, value: JobOutput) -> bool:
        """Whether a value moves beside the jobs: not where one thread sends, nor where
        a device does what it is told one after the other."""
        return not self.request.ordered and self._devices(value) <= {"cpu"}


def parked_bytes(value: JobOutput, step: Step) -> float:
    """Bytes of memory that a value takes elsewhere."""
    known = of_call(value.node)
    size: float = sum(spec.bytes for spec in step.specs(value)[0])
    return known.get("held", size) if known.get("bundle") else size
