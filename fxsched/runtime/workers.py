"""Which workers a transport has: the threads of this process, or the ranks of a job."""

from __future__ import annotations

from ..ir.request import Transport
from ..transport.world import IN_PROCESS, choose
from .ranks import Ranks
from .threads import Threads

Workers = Threads | Ranks


def workers_of(
    transport: Transport | None, count: int, timeout: float | None, share: bool = True
) -> Workers:
    """The workers of a transport, or of the one to take where none is given.

    share: whether those of a machine share torch's intra-op threads.
    Raises PlanError if there are not so many.
    """
    kind = choose(transport, count)
    if kind in IN_PROCESS:
        return Threads(count, ordered=kind == "strict", share=share)
    return Ranks(count, transport, timeout, share)
