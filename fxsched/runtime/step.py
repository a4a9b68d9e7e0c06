"""One call of the compiled function: inputs in, programs run, results out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..clock.timeline import Event
from ..ir import ops
from ..ir.early import Early
from ..ir.graphs import Role
from ..ir.loss_scale import Scale
from ..ir.meta import of_call
from ..jobs.job import Job
from ..params.updates import StageOptimizers
from ..placement.row_warnings import RowWatch
from ..plans.metrics import STEPS
from ..plans.plan import Plan
from .input_agreement import Agreement
from .ranks import Ranks
from .recorder import Recorder
from .run import Run
from .runnable import Runnable
from .threads import Threads


class BeforeCall(NamedTuple):
    """What is done with the inputs of each call of one plan before it runs.

    agreement: of ranks on their inputs. watch: warns of losses and outputs.
    early: computes inputs that follow the call's.
    """

    agreement: Agreement | None
    watch: RowWatch | None
    early: Early | None


class Step:
    """A planned step; see autograd_call.

    scale: gives what B starts from.
    optimizers: step the weights, if the plan has updates.
    recorder: of the backend, if it keeps a flight record.
    events: of the last call, from its start on, if `record`; where B runs in
        backward(), as if that followed at once.
    earlier: events of some calls before it.
    latest: the runs of that call.
    arrivals: reads and updates of weights in that call, each worker's as they came,
        where they are in order of arrival.
    """

    def __init__(
        self,
        plan: Plan,
        programs: dict[int, Runnable],
        workers: Threads | Ranks,
        before: BeforeCall,
        scale: Scale | None,
        optimizers: StageOptimizers | None,
        record: bool,
        recorder: Recorder | None,
    ) -> None:
        self.plan, self.programs, self.workers = plan, programs, workers
        self.before, self.scale, self.record = before, scale, record
        self.optimizers, self.recorder = optimizers, recorder
        self.events: tuple[Event, ...] = ()
        self.earlier: deque[tuple[Event, ...]] = deque(maxlen=STEPS - 1)
        self.arrivals: tuple[Job, ...] = ()
        self.latest: list[Run] = []
        self.apart: bool | None = None  # whether ranks draw other numbers than rank 0
        self.factor: float | None = None  # what it gave in the last call
        self.unread = 0  # calls with B since the last backward()
        self.base = 0  # the number that the random numbers of the last call come of

    def inputs(self, args: tuple[Any, ...], said: set[str]) -> tuple[Any, ...]:
        """What to run on: the arguments on which ranks agree, and what is computed for
        the whole batch beforehand."""
        agreement, watch, early = self.before
        inputs = args if agreement is None else agreement(args)
        with self.workers.guarded():
            if watch is not None:
                watch(inputs, said)
            return inputs if early is None else (*inputs, *early(*inputs))

    def forget(self) -> None:
        """What is asked at the first calls is asked anew: after an error, some ranks
        may have drawn more numbers than others."""
        self.apart = None
        if self.before.agreement is not None:
            self.before.agreement.calls = 0

    def _draw(self) -> int:
        """The number that the random numbers of this call come of, from torch's
        generator; rank 0's, where those of the ranks differ. 0 if there are none.

        Whether they do is asked at the first call. A job that draws in F on one rank
        and again in B on another must not depend on what ranks draw later on.
        """
        if not self.plan.draws:
            return 0
        number = ops.draw_base()
        if self.apart is None:
            self.apart = self.workers.differ(number) or self.plan.redraws
        return self.workers.first(number) if self.apart else number

    def start(self, args: tuple[Any, ...]) -> list[Run]:
        """The runs of the programs here, on `args`; nothing has run yet."""
        random = self.base = self._draw()
        self.factor = None if self.scale is None else self.scale()
        optimizers = None if self.optimizers is None else self.optimizers.begin(args)

        def placeholders(worker: int, program: fx.GraphModule) -> dict[str, Any]:
            values: dict[str, Any] = {}
            own = None if optimizers is None else optimizers.of(worker)
            weights = args if own is None else own.args
            for node in program.graph.find_nodes(op="placeholder"):
                if "group" in of_call(node):
                    group = self.plan.groups[of_call(node)["group"]]
                    values[node.name] = tuple(
                        Tensor.detach(weights[each.input]) for each in group.state
                    )
                elif "input" in of_call(node):
                    values[node.name] = args[of_call(node)["input"]].detach()
                elif node.name == "optimizer":
                    values[node.name] = own
                elif node.name == "loss_scale":
                    values[node.name] = self.factor
                else:
                    values[node.name] = random
            return values

        if self.events:
            self.earlier.append(self.events)
        self.events = ()
        self.latest = self.workers.start(self.programs, placeholders)
        if self.recorder is not None:
            self.recorder.begin(self.latest, self.workers)
        return self.latest

    def advance(
        self, runs: list[Run], tangents: dict[int, Tensor] | None
    ) -> dict[str, Any]:
        """Runs them up to their end, or to where they wait for the gradients that
        backward() gets; the results of the workers here, as one."""
        merged: dict[str, Any]
        merged = {"outputs": (), "state": {}, "versions": {}}
        merged |= {"groups": {}, "inputs": {}}
        begin = self.workers.together() if self.record else 0.0
        try:
            advanced = self.workers.advance(runs, tangents)
        except BaseException as error:
            if self.recorder is not None:
                self.recorder.write(error, self.workers)
            raise
        if self.record:
            self._record(runs, begin)
        for results in advanced:
            for key, value in results.items():
                if isinstance(value, dict):
                    merged[key] = value | merged[key]
                else:
                    merged[key] = merged[key] or value
        return merged

    def note_arrivals(self) -> None:
        """Takes the order in which this call's updates came, of all workers."""
        if self.plan.by_arrival and self.optimizers is not None:
            self.arrivals = tuple(self.workers.gather(self.optimizers.arrivals))

    def _record(self, runs: list[Run], begin: float) -> None:
        """Adds what ran since `begin` to the events, on one clock for all workers."""
        shift = max((event.end for event in self.events), default=0.0) - begin
        new = [
            event._replace(start=event.start + shift, end=event.end + shift)
            for run in runs
            for event in run.events[run.told :]
        ]
        for run in runs:
            run.told = len(run.events)
        new = sorted(self.workers.gather(new), key=lambda e: (e.start, e.worker))
        if runs is self.latest:  # a call before it may run its backward() now
            self.events += tuple(new)

    def outputs(
        self, args: tuple[Any, ...], results: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Writes new buffers to the model; gives the outputs."""
        outputs = list(results["outputs"])
        returned = {output.state: output for output in self.plan.outputs}
        with torch.no_grad():
            for group, values in results["state"].items():
                state = self.plan.groups[int(group)].state
                for each, value in zip(state, values, strict=True):
                    if each.input not in returned:
                        args[each.input].copy_(value)
            for position, value in results["versions"].items():
                args[int(position)].copy_(value)
            for position, output in enumerate(self.plan.outputs):
                if isinstance(output.constant, Tensor):
                    outputs[position] = output.constant.clone()
                if output.kind == "given" and output.state is not None:
                    outputs[position] = args[output.state].clone()
                elif output.state is not None and not output.replaced:
                    tensor = args[output.state]
                    outputs[position] = Tensor.copy_(tensor, outputs[position])
        return tuple(outputs)

    def parameters(self, args: tuple[Any, ...]) -> dict[str, Tensor]:
        """The model's parameters among the arguments of a call, by their names."""
        return {
            self.plan.weight_name(state): args[self.plan.weight_at(state.input)]
            for group in self.plan.groups
            for state in group.state
            if state.role is Role.PARAMETER
        }

    def gradients(
        self, results: dict[str, Any], leaves: Sequence[int]
    ) -> list[Tensor | None]:
        """The gradient of each leaf; None for those that other workers keep."""
        gradient_of: dict[int, Tensor] = {
            int(i): g for i, g in results["inputs"].items()
        }
        for group, gradients in results["groups"].items():
            weights = self.plan.groups[int(group)]
            state, trained = weights.state, weights.trained
            wanted = [s.input for s, t in zip(state, trained, strict=True) if t]
            gradient_of.update(zip(wanted, gradients, strict=True))
        return [gradient_of.get(i) for i in leaves]
