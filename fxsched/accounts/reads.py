"""What each line of a step reads, on each worker."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ..ir import joint
from ..ir.step import JobOutput, Message, Op, Step, Value, values_in
from ..jobs.job import Job


class Reads:
    """What lines read; a message, where it is sent."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.nodes = [_read_nodes(recipe.nodes) for recipe in step.recipes]

    def of(self, line: Op | Message, worker: int) -> Iterator[Value]:
        """What a line reads on a worker."""
        if isinstance(line, Message):
            if line.source == worker:
                yield line.value
            return
        yield from values_in((line.args, line.after))
        if line.target is None and line.job is not None:
            yield from self.of_job(line.job)

    def of_job(self, job: Job) -> Iterator[Value]:
        """What an F, B or W reads of what other jobs make."""
        for node in self.nodes[self.step.jobs.at[job.stage, job.direction]]:
            if node in self.step.shared:
                yield self.step.shared[node]
            else:
                yield JobOutput(*joint.resolve(node, job.microbatch))


def _read_nodes(nodes: Iterator[fx.Node]) -> list[fx.Node]:
    """What a kind of job reads of other jobs."""
    own = dict.fromkeys(nodes)
    read = dict.fromkeys(n for node in own for n in node.all_input_nodes)
    return [n for n in read if n.op != "placeholder" and n not in own]
