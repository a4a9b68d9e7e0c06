"""How long messages take in a simulated step."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

import networkx as nx

from ..jobs.job import PlanError
from ..jobs.user_values import is_int, is_number
from .flows import LinkName, Wire
from .jobs import Jobs


@dataclass(frozen=True)
class Link:
    """A separate wire from each worker to each other worker.

    Messages on one wire leave one after the other.

    bandwidth: bytes per second (or per unit of time of the durations).
    latency: the time from when the last byte leaves to when it arrives.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        numbers = is_number(self.bandwidth) and is_number(self.latency)
        if not numbers or not self.bandwidth > 0:
            raise PlanError(
                f"{self}: give a bandwidth above 0 and a latency of 0 or more"
            )

    def alone(self, size: float) -> float:
        """The time that a message of `size` bytes takes if no other is under way."""
        return size / self.bandwidth + self.latency

    def wire(self, source: int, to: int) -> Wire:
        """The Wire that messages from worker `source` to worker `to` use."""
        name = LinkName(source, to, f"worker {source} to worker {to}")
        return Wire(self.bandwidth, latency=self.latency, links=(name,))

    @property
    def capacity(self) -> Mapping[Hashable, float]:
        """The capacities that several pairs of workers share; a Link has none."""
        return {}

    def check_workers(self, workers: int) -> None:
        """Does nothing: a Link connects any number of workers."""


@dataclass(frozen=True)
class Rate:
    """The speed of messages, for Network.

    bandwidth: bytes per second, in each direction.
    latency: seconds from when the last byte leaves to when it arrives.
    message: seconds before the first byte of each message leaves. Messages from one
        worker to another worker pay this time one after the other.
    duplex: the bytes per second that a host sends and receives together, as a multiple
        of `bandwidth`: from 1.0 (half duplex) to 2.0 (full duplex).
    """

    bandwidth: float
    latency: float = 0.0
    message: float = 0.0
    duplex: float = 2.0

    def __post_init__(self) -> None:
        numbers = all(map(is_number, (self.bandwidth, self.latency, self.message)))
        if not numbers or not self.bandwidth > 0:
            raise PlanError(
                f"{self}: give a bandwidth above 0, and a latency and a time of a "
                "message of 0 or more"
            )
        if not is_number(self.duplex) or not 1 <= self.duplex <= 2:
            raise PlanError(f"{self}: give a duplex of 1.0 to 2.0")


@dataclass(frozen=True)
class Network:
    """Hosts with workers; each host has one link out and one link in.

    hosts: the workers of each host, numbered from 0, as [[0, 1], [2, 3]].
    inside: the Rate between workers of one host; each pair of them has its own wire.
    between: the Rate between hosts. All messages that leave a host share its link out,
        and all messages that arrive share its link in, in equal parts; what a message
        can't use, the others get (max-min fairness; see fxsched/clock/flows.py).
    """

    hosts: Sequence[Sequence[int]]
    inside: Rate
    between: Rate

    def __post_init__(self) -> None:
        lists = isinstance(self.hosts, Sequence) and all(
            isinstance(host, Sequence) and not isinstance(host, str)
            for host in self.hosts
        )
        found = [worker for host in self.hosts for worker in host] if lists else []
        if (
            not found
            or not all(map(is_int, found))
            or sorted(found) != list(range(len(found)))
        ):
            raise PlanError(
                f"Network(hosts={self.hosts!r}): give the workers of each host, each "
                "worker once and numbered from 0, as [[0, 1], [2, 3]]"
            )
        for name in ("inside", "between"):
            if not isinstance(getattr(self, name), Rate):
                raise PlanError(
                    f"Network({name}={getattr(self, name)!r}): give a Rate, such as "
                    "Rate(bandwidth=1.25e9, latency=5e-5)"
                )
        object.__setattr__(self, "hosts", tuple(map(tuple, self.hosts)))

    @classmethod
    def load(cls, file: str | PathLike[str]) -> Network:
        """Reads a network from a JSON file, as `fxsched network` and save() write it.

        Raises PlanError for another file.
        """
        try:
            found = json.loads(Path(file).read_text())
            inside, between = (Rate(**found[name]) for name in ("inside", "between"))
            return cls(found["hosts"], inside, between)
        except OSError as error:
            raise PlanError(
                f"{file}: {error.strerror}; give a file that `fxsched network` wrote"
            ) from error
        except (ValueError, TypeError, LookupError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"{file} holds no network: {error}; give a file that `fxsched network` "
                "or Network.save wrote"
            ) from error

    def save(self, file: str | PathLike[str]) -> None:
        """Writes this network into a JSON file, for load() and network=."""
        Path(file).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def host(self, worker: int) -> int:
        """The number of the host of a worker."""
        return next(i for i, host in enumerate(self.hosts) if worker in host)

    def alone(self, size: float) -> float:
        """The time that a message of `size` bytes takes if no other is under way.

        The message goes between two hosts or, if there is only one host, inside it.
        """
        rate = self.between if len(self.hosts) > 1 else self.inside
        return rate.message + size / rate.bandwidth + rate.latency

    def wire(self, source: int, to: int) -> Wire:
        """The Wire that messages from worker `source` to worker `to` use."""
        a, b = self.host(source), self.host(to)
        rate = self.inside if a == b else self.between
        shared, links = tuple[Hashable, ...](), tuple[LinkName, ...]()
        if a != b:
            links = LinkName(a, 0, f"host {a} out"), LinkName(b, 1, f"host {b} in")
            shared = ("out", a), ("in", b)
            if rate.duplex < 2:
                shared += (("both", a), ("both", b))
        return Wire(rate.bandwidth, shared, rate.message, rate.latency, links)

    @property
    def capacity(self) -> Mapping[Hashable, float]:
        """Bytes per second of each host's links, by name."""
        rate, found = self.between, dict[Hashable, float]()
        for host in range(len(self.hosts)):
            found["out", host] = found["in", host] = rate.bandwidth
            found["both", host] = rate.duplex * rate.bandwidth
        return found

    def check_workers(self, workers: int) -> None:
        """Raises PlanError unless every worker has a host."""
        count = sum(map(len, self.hosts))
        if count != workers:
            raise PlanError(
                f"Network(hosts={[*map(list, self.hosts)]!r}) has {count} workers, but "
                f"the schedule has {workers}; name the host of each"
            )


Wires = Link | Network
Transfer = float | Wires | None


def check_transfer(call: str, transfer: object) -> None:
    """Raises PlanError for what is no time of messages. call: what it was given to."""
    known = transfer is None or isinstance(transfer, Wires)
    if not (known or is_number(transfer)):
        raise PlanError(
            f"{call}(transfer={transfer!r}): give a time of 0 or more, a Link, a "
            "Network, or None for the `seconds` of edges"
        )


def check_edges(stages: nx.DiGraph[int]) -> None:
    """Raises PlanError for edges that don't say how many bytes go along them."""
    for a, b, data in stages.edges(data=True):
        if "bytes" not in data:
            raise PlanError(
                f"simulate(transfer=Link or Network): the edge of stages from {a} to "
                f"{b} has no `bytes`; give a networkx.DiGraph whose edges have them"
            )


def edge_between(stages: nx.DiGraph[int], one: int, other: int) -> Mapping[str, float]:
    """What two stages send each other, whichever reads the other one."""
    data: Mapping[str, float] | None = stages.get_edge_data(one, other)
    return stages.get_edge_data(other, one, {}) if data is None else data


def delays(
    jobs: Jobs, stages: nx.DiGraph[int], transfer: Transfer
) -> dict[tuple[int, int], float]:
    """How long what one kind of job makes takes to another kind on another worker; on
    wires, if nothing else is under way."""
    found: dict[tuple[int, int], float] = {}
    for k, before in enumerate(jobs.preds):
        for p in before:
            a, b = jobs.kinds[p][0], jobs.kinds[k][0]
            edge = edge_between(stages, a, b)
            if transfer is None:
                found[p, k] = edge.get("seconds", 0.0)
            elif isinstance(transfer, Wires):
                held = stages.nodes[a].get("held", 0.0)
                size = held if a == b else edge.get("bytes", 0.0)
                found[p, k] = transfer.alone(size)
            else:
                found[p, k] = transfer
    return found
