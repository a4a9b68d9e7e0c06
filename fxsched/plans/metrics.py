"""Metrics of the last steps, by worker, for logs and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

import torch

from ..accounts.traffic import traffic
from ..clock.timeline import Event
from ..draw.plan_tables import busy_seconds
from .plan import Plan

STEPS = 10  # the last ones that figures are medians of
KINDS = {
    "fxsched_step_seconds": "From the start of a call to the end of its last job.",
    "fxsched_busy_share": "The share of a step in which a worker runs jobs.",
    "fxsched_sent_bytes": "What a worker sends in a step, as planned.",
    "fxsched_received_bytes": "What a worker receives in a step, as planned.",
    "fxsched_memory_bytes": "The most that a worker holds in a step, as planned.",
    "fxsched_device_peak_bytes": "The most that this process has held on its device.",
}
UNITS = ("seconds", "bytes")


class Writer(Protocol):
    """What is used of torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Notes a number at a step."""


class WorkerMetrics(NamedTuple):
    """Metrics of one worker in the last steps.

    busy: the share of the step in which it runs jobs, 0 to 1, at the median.
    sent, received: bytes in a step, by the planned shapes; your own passes may have
        reduced them.
    memory: the most bytes that it holds of each kind, as planned, whenever that is.
    """

    busy: float
    sent: int
    received: int
    memory: dict[str, float]


@dataclass(frozen=True)
class Metrics:
    """Metrics of the last STEPS steps of one plan; see Backend.metrics.

    seconds: from the start of a call to the end of its last job, at the median.
    steps: how many steps the metrics cover. workers: a WorkerMetrics for each worker.
    device_peak: the most bytes that this process has held on its GPU or other
        accelerator, as measured by PyTorch; None without one.
    """

    seconds: float
    steps: int
    workers: tuple[WorkerMetrics, ...]
    device_peak: int | None

    def _samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Names, labels and values; those of a name in a row."""
        yield "fxsched_step_seconds", {}, self.seconds
        for kind, values in (
            ("fxsched_busy_share", [each.busy for each in self.workers]),
            ("fxsched_sent_bytes", [each.sent for each in self.workers]),
            ("fxsched_received_bytes", [each.received for each in self.workers]),
        ):
            for worker, value in enumerate(values):
                yield kind, {"worker": str(worker)}, value
        for worker, each in enumerate(self.workers):
            for held, size in each.memory.items():
                labels = {"worker": str(worker), "held": held}
                yield "fxsched_memory_bytes", labels, size
        if self.device_peak is not None:
            yield "fxsched_device_peak_bytes", {}, self.device_peak

    def openmetrics(self) -> str:
        """All metrics in the text format of OpenMetrics 1.0, as gauges."""
        lines, last = [], ""
        for name, labels, value in self._samples():
            if name != last:
                unit = name.rpartition("_")[2]
                lines.append(f"# TYPE {name} gauge")
                lines += [f"# UNIT {name} {unit}"] * (unit in UNITS)
                lines.append(f"# HELP {name} {KINDS[name]}")
            inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
            shown = f"{{{inside}}}" if labels else ""
            lines.append(f"{name}{shown} {float(value)!r}")
            last = name
        return "\n".join([*lines, "# EOF", ""])

    def log(self, writer: Writer, step: int) -> None:
        """Writes all metrics to a SummaryWriter, under fxsched/busy_share/worker 0 etc.

        writer: any object with add_scalar(tag, value, step).
        """
        for name, labels, value in self._samples():
            words = [f"worker {labels['worker']}"] if "worker" in labels else []
            words += [labels["held"]] if "held" in labels else []
            tag = "/".join(["fxsched", name.removeprefix("fxsched_"), *words])
            writer.add_scalar(tag, value, step)


def metrics_of(plan: Plan, timelines: Sequence[Sequence[Event]]) -> Metrics:
    """Metrics of a plan's steps, from backend.timeline of one or more of them."""
    workers = plan.schedule.workers
    seconds = [max(event.end for event in each) for each in timelines]
    shares: list[list[float]] = [[] for _ in range(workers)]
    for took, timeline in zip(seconds, timelines, strict=True):
        for worker, each in enumerate(busy_seconds(plan.schedule, timeline)):
            shares[worker].append(each / took)
    moved = traffic(plan.step)
    sent, received = [m.sent for m in moved], [m.received for m in moved]
    peaks = [peak.each._asdict() for peak in plan.memory]
    measured = getattr(torch.get_device_module(), "max_memory_allocated", int)
    peak = measured() or None  # 0 where the device isn't in use
    figures = zip(map(median, shares), sent, received, peaks, strict=True)
    by_worker = tuple(WorkerMetrics(*each) for each in figures)
    return Metrics(median(seconds), len(timelines), by_worker, peak)
