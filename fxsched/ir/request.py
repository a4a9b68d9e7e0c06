"""What the user asked for, as every pass reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, harmonic_mean
from typing import Literal

import torch

from ..clock.network import Link, Wires
from ..jobs.answers import OF_STAGE
from ..jobs.job import Direction, Job, PlanError, whole_stage
from ..jobs.schedule import Schedule
from ..jobs.user_values import raised
from .encodings import AS_IT_IS, Encode
from .graphs import Specs
from .parts import KeptParts

# The options of fxsched.backend that are words, and all words that each may be.
Order = Literal["static", "dynamic"]
Carry = Literal["auto", "saved", "recompute"]
Carried = Carry | Callable[[int], Carry] | tuple[tuple[str, Carry], ...]
LossReduction = Literal["exact", "mean", "sum", "weighted"]
Pairs = Literal["auto", "joint", "spread"]
BatchNorm = Literal["microbatch", "batch"]
StageCompiler = Literal["eager", "inductor"]
Capture = Literal["graphs"]
Ragged = Literal["error", "fewer", "pad"]
PassedRows = Literal["all", "local"]
Sums = Literal["auto", "messages", "pieces", "ring", "collective"]
Transport = Literal["threads", "distributed", "gloo", "nccl", "strict"]
CheckInputs = Literal["first", "always", "never"]
BufferReduction = Literal["mean", "sum", "last"]
CutWord = Literal["column", "row", "expert", "sequence"]
Shards = Literal["auto"] | tuple[tuple[str, CutWord], ...]
OutputReduction = Literal["mean", "sum", "max", "min", "last"]
Device = Literal["cpu", "A10", "L4", "A100", "H100", "H200"]  # partition.costs.RATES


@dataclass(frozen=True)
class Request:
    """One planning: a schedule, the backend's options, and what earlier plans fixed.

    loss_reduction: "mean" or "sum" over microbatches; before the trace, "exact" and
        "weighted" too.
    training: whether gradients are wanted.
    owners: workers that keep a parameter or buffer since an earlier plan, by its
        position in the call.
    cuts: how ranks keep a weight in parts since an earlier plan, by position; it is
        among `owners` too.
    updaters: the worker that updates a parameter, where an earlier plan's u said.
    readers: workers that hand outputs to the user; None for all of them.
    shards: "auto", or patterns of names of modules with how their weights are cut.
    inputs: how many inputs a call has, with what is computed of them beforehand; parts
        of weights come after them.
    most: microbatches of a batch that divides.
    scaled: whether each call has a scale of its own for the loss's gradient.
    updates: positions in the call of what the optimizer has, in its order; () without
        one. Whether there are updates, schedule.update_every says.
    moments: shapes of what the optimizer keeps of each of these and is averaged with
        it, by position, where schedule.average_every makes replicas.
    state_bytes: of the optimizer's state of these, by position; {} where not known.
    hosts: the workers of each host; () for one host. gloo: whether values go through
        the process group within a host, too. ordered: whether the messages from one
        worker to another are matched by their order, as those of NCCL are.
    network: what messages go through, if the user says it; of a Network, its hosts are
        the `hosts`.
    Other fields are the options of fxsched.backend, checked.
    """

    schedule: Schedule
    stages: str | tuple[str, ...] = "auto"
    carry: Carried = "saved"
    loss_reduction: LossReduction = "exact"
    training: bool = True
    owners: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cuts: Mapping[int, KeptParts] = field(default_factory=dict)
    updaters: dict[int, int] = field(default_factory=dict)
    memory_limit: float | None = None
    same_stage: tuple[tuple[str, ...], ...] = ()
    readers: tuple[int, ...] | None = None
    prefetch: int | None = None
    batch_dims: Mapping[str | int, int | None] = field(default_factory=dict)
    ragged: Ragged = "error"
    most: int = 1
    shards: Shards = "auto"
    inputs: int = 0
    rows: PassedRows = "all"
    buffers: dict[str, BufferReduction] = field(default_factory=dict)
    outputs: dict[int | str, OutputReduction] = field(default_factory=dict)
    scaled: bool = False
    updates: tuple[int, ...] = ()
    moments: Mapping[int, Specs] = field(default_factory=dict)
    state_bytes: Mapping[int, int] = field(default_factory=dict)
    clip_grad_norm: float | None = None
    skip_nonfinite: bool = False
    order: Order = "static"
    pairs: Pairs = "auto"
    batch_norm: BatchNorm | None = None
    deterministic: bool = False
    check_finite: bool = False
    gradient_dtype: torch.dtype | None = None
    encode: Encode = AS_IT_IS
    sums: Sums = "auto"
    hosts: tuple[tuple[int, ...], ...] = ()
    gloo: bool = False
    ordered: bool = False
    network: Wires | None = None
    device: Device | None = None

    def carries(self, stage: int) -> Carry:
        """Whether a stage's B gets what its F saved, or runs F again.

        Modules that are named are computed again without the rest of their stages; see
        passes/recompute.py. Raises PlanError if a function doesn't say which.
        """
        if not callable(self.carry):
            return "recompute" if self.carry == "recompute" else "saved"
        number = whole_stage(stage)
        try:
            word = self.carry(number)
        except Exception as error:
            raise raised(f"carry({number})", error, OF_STAGE) from error
        if word not in ("saved", "recompute"):
            raise PlanError(
                f"carry({number}) returned {word!r}; return 'saved' or 'recompute'"
            )
        return word

    @cached_property
    def link(self) -> Link | None:
        """What a message from a stage to the next meets on the network, at the mean of
        stages; None without a network."""
        schedule = self.schedule
        stages = range(schedule.stages or schedule.workers)
        places = (schedule.place(Job(s, 0, Direction.FORWARD)) for s in stages)
        return self._mean_link(place.compute for place in places)

    @cached_property
    def shard_link(self) -> Link | None:
        """What a message between shards of a stage meets on the network; None without
        a network."""
        job, shards = Job(0, 0, Direction.FORWARD), range(self.schedule.shards)
        return self._mean_link(self.schedule.place(job, k).compute for k in shards)

    def _mean_link(self, workers: Iterable[int]) -> Link | None:
        """The mean from each of these to the next; where they are all one, between
        neighbours of all workers."""
        if self.network is None or self.schedule.workers == 1:
            return None
        pairs = [pair for pair in pairwise(workers) if pair[0] != pair[1]]
        pairs = pairs or [*pairwise(range(self.schedule.workers))]
        wires = [self.network.wire(*pair) for pair in pairs]
        speed = harmonic_mean(wire.bandwidth for wire in wires)
        return Link(speed, fmean(wire.begin + wire.latency for wire in wires))

    def host(self, worker: int) -> int:
        """The number of a worker's host."""
        return next((i for i, own in enumerate(self.hosts) if worker in own), 0)

    def near(self, one: int, other: int) -> bool:
        """Whether a worker hands values to another through memory."""
        return not self.gloo and self.host(one) == self.host(other)

    @property
    def apart(self) -> bool:
        """Whether some workers send each other messages over a network."""
        return self.gloo or len(self.hosts) > 1

    @property
    def sums_by_collective(self) -> bool:
        """Whether the transport adds up what several workers give. What is encoded is
        not what is added up."""
        adds = self.ordered and not self.deterministic
        adds = adds and self.encode.gradients is None
        return adds and self.sums in ("auto", "collective")

    @property
    def sums_in_pieces(self) -> bool:
        """Whether owners of a sum add up a piece of it each."""
        return self.apart if self.sums == "auto" else self.sums != "messages"

    @property
    def sums_in_ring(self) -> bool:
        """Whether pieces go from each host to the next alone. Hosts that all send to
        all others get in each other's way; but what is encoded is rounded on each."""
        ring = len(self.hosts) > 2 and self.encode.gradients is None
        return ring if self.sums == "auto" else self.sums == "ring"

    @property
    def ahead(self) -> int:
        """The weights of how many further jobs a worker asks for."""
        default = 2 if len(self.hosts) > 1 else 1
        return default if self.prefetch is None else self.prefetch

    @property
    def by_arrival(self) -> bool:
        """Whether updates are in order of arrival."""
        dynamic = self.order == "dynamic" and not self.schedule.in_order
        return dynamic and self.schedule.ahead > 0
