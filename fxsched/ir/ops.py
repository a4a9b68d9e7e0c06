"""The functions that a program calls: targets of call_function nodes in its graph.

A bundle is a tuple of tensors that is sent as one value: the weights of a stage, the
tensors saved between F and B, the gradients of the weights.

The functions of the first part are plain arithmetic on tensors. Those of the second
part are transfers: the runtime carries them out, and calling them outside a step is an
error.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .encodings import decode as decode
from .encodings import decode_one as decode_one
from .encodings import encode as encode
from .finite import finite as finite
from .generators import devices_in, kept_generators
from .parked import offload as offload
from .parked import reload as reload
from .pieces import join as join
from .pieces import piece as piece

Bundle = tuple[Tensor, ...]


def rows(value: Tensor, microbatch: int, microbatches: int, dim: int = 0) -> Tensor:
    """The rows of one microbatch of a batch, as a view."""
    size = value.shape[dim] // microbatches
    return value.narrow(dim, microbatch * size, size)


def packed(value: Tensor) -> Tensor:
    """The value with contiguous memory, in the order of dimensions that B expects."""
    return value.contiguous()


def collect(microbatches: int, dim: int | None, *parts: Sequence[Any]) -> Tensor:
    """Joins the parts of microbatches in order.

    parts: pairs (microbatches that it holds, tensors). Raises AssertionError if a
        microbatch is missing.
    """
    ordered = _ordered(microbatches, parts)
    if len(ordered) == 1:
        return ordered[0].clone()  # B may still need it
    return torch.cat(ordered, 0 if dim is None else dim)


def total(microbatches: int, scale: float, *parts: Sequence[Any]) -> Tensor:
    """The sum of one 0-d tensor per microbatch, in order, each times `scale`."""
    scaled = (value * scale for value in _ordered(microbatches, parts))
    return functools.reduce(torch.add, scaled)


def fold(how: str, microbatches: int, *parts: Sequence[Any]) -> Tensor:
    """The "mean", "sum", "max" or "min" of one tensor per microbatch."""
    step = {"max": torch.maximum, "min": torch.minimum}.get(how, torch.add)
    result = functools.reduce(step, _ordered(microbatches, parts))
    return result / microbatches if how == "mean" else result


def _ordered(count: int, parts: Sequence[Sequence[Any]]) -> list[Tensor]:
    """The tensors of so many microbatches, in order."""
    found = {b: t for held, own in parts for b, t in zip(held, own, strict=True)}
    assert sorted(found) == list(range(count)), f"collected only {sorted(found)}"
    return [found[b] for b in range(count)]


def bundle(*tensors: Tensor) -> Bundle:
    """Several tensors as one value."""
    return tensors


def add(*gradients: Tensor) -> Tensor:
    """The sum of the gradients of a value from its readers, in this order."""
    return functools.reduce(torch.add, gradients)


def loss_gradient(loss: Tensor, scale: float, factor: float = 1.0) -> Tensor:
    """The gradient that B of the loss's stage starts from.

    It is d(total)/d(this loss), times the loss scale of the call.
    """
    return torch.full_like(loss, scale * factor)


def share(tangent: Tensor, scale: float) -> Tensor:
    """One microbatch's part of the gradient of an averaged or summed 0-d output."""
    return tangent * scale


def accumulate(total: Bundle, gradients: Bundle) -> Bundle:
    """Adds gradients to a worker's running sum, in place."""
    torch._foreach_add_(list(total), list(gradients))
    return total


def reduce(place: int, *sums: Bundle) -> Bundle:
    """The sum of the workers' gradients at the weight worker, in this order.

    place: which of the sums is the weight worker's own; the result is written into its
        memory. The workers need their sums no more.
    """
    total = sums[0]
    for i, other in enumerate(sums[1:], 1):
        into, new = (other, total) if i == place else (total, other)
        torch._foreach_add_(list(into), list(new))
        total = into
    return total


def cast(gradients: Bundle, dtypes: Sequence[torch.dtype]) -> Bundle:
    """Gradients, each cast to the type of the same position in `dtypes`."""
    pairs = zip(gradients, dtypes, strict=True)
    return tuple(gradient.to(dtype) for gradient, dtype in pairs)


def merge_buffers(
    how: Sequence[str], last: int, before: Bundle, *after: Bundle
) -> Bundle:
    """A stage's buffers at the end of a step, from each worker that ran its F.

    how: for each buffer, the "mean" of the workers' values, the "sum" of what the
        workers added to the value before the step, or the "last": the value of worker
        number `last` of `after`.
    """
    if len(after) == 1:
        return after[0]
    result = []
    for rule, old, *new in zip(how, before, *after, strict=True):
        if rule == "mean":
            result.append(torch.stack(new).mean(0))
        elif rule == "sum":
            result.append(old + sum(each - old for each in new))
        else:
            result.append(new[last])
    return tuple(result)


def norms(gradients: Bundle) -> Tensor:
    """The norm of each gradient of a group, in the gradient's type, as torch clips."""
    return torch.stack(torch._foreach_norm(list(gradients)))


def clip_factor(
    limit: float | None,
    skips: bool,
    places: Sequence[tuple[int, int]],
    *norms: Tensor,
) -> Tensor:
    """The factor of gradients, as in torch.nn.utils.clip_grad_norm_.

    The factor is NaN if the update is to be skipped.

    limit: the largest norm of all gradients; None for a factor of 1.
    skips: whether an update is skipped if the norm of all gradients isn't finite.
    places: for each parameter, which of `norms` has its norm, and at which position.
        The order of parameters is the same under every schedule.
    """
    norm = torch.linalg.vector_norm(torch.stack([norms[i][k] for i, k in places]))
    factor = torch.ones_like(norm)
    if limit is not None:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return factor.masked_fill(~norm.isfinite(), math.nan) if skips else factor


def update(
    optimizer: Any,
    group: int,
    number: int | None,
    weights: Bundle,
    gradients: Bundle,
    factor: Tensor | None,
    *before: Any,
) -> Bundle:
    """The weights of a group after a step of the optimizer, in the same memory.

    optimizer: an object that the runtime passes; see params/updates.py.
    number: how many steps on this group come before this one in the call; None if
        updates run in order of arrival.
    before: copies of the weights made before this step, and credits of jobs that read
        the weights; or updates that come before.
    """
    new: Bundle | None = optimizer.step(group, number, gradients, factor)
    return weights if new is None else new


def copy(optimizer: Any, weights: Bundle, *before: Any) -> Bundle:
    """A copy of weights that stays the same while updates go on.

    before: what the copy waits for, if updates run in order of arrival.
    """
    if optimizer.leaves_old:
        return weights
    return tuple(weight.clone() for weight in weights)


def correct(
    optimizer: Any, group: int, number: int, gap: float, weights: Bundle
) -> Bundle:
    """A copy of a group's weights after `number` updates, less `gap` velocities.

    The velocity is that after the same updates of the call.
    """
    corrected: Bundle = optimizer.corrected(group, number, gap, weights)
    return corrected


def note(optimizer: Any, job: str) -> None:
    """Records that a stage's weights are read for its F, or updated, at this time.

    Used if updates run in order of arrival.
    """
    optimizer.note(job)


def renew(optimizer: Any, weights: Bundle, new: Bundle, *before: Any) -> Bundle:
    """A worker's copy of weights, set to the result of another worker's update.

    optimizer: None if your loop steps the optimizer. before: as for update.
    If it is called twice without a step between, the second call changes nothing, and
    autograd doesn't count it as a change of the weights.
    """
    if optimizer is not None and optimizer.leaves_old:
        return new
    for mine, value in zip(weights, new, strict=True):
        if mine.data_ptr() != value.data_ptr():  # threads share them
            mine.data.copy_(value)
    return weights


def replica(
    optimizer: Any, group: int, moments: bool, copied: bool, weights: Bundle
) -> Bundle:
    """A worker's own weights of a group, those that are trained, after its own steps.

    moments: whether the optimizer's state of these weights is included.
    copied: whether to copy the weights, so that they stay the same while steps go on.
    """
    values: Bundle = optimizer.replica(group, moments)
    return tuple(value.clone() for value in values) if copied else values


def average(elastic: float | None, centre: Bundle | None, *replicas: Bundle) -> Bundle:
    """The mean of the workers' values, added up in order.

    centre: the centre, for weights with elastic averaging; the result is then the
        centre moved by `elastic` towards each worker's weights.
    """
    sums = [
        functools.reduce(torch.add, values) for values in zip(*replicas, strict=True)
    ]
    count = len(replicas)
    means = [value / count for value in sums]
    if elastic is not None and centre is not None:
        pairs = list(zip(centre, sums, strict=False))  # moments follow weights
        moved = [old + elastic * (total - count * old) for old, total in pairs]
        means[: len(moved)] = moved
    return tuple(means)


def take(
    optimizer: Any,
    group: int,
    how: float | tuple[float, float] | None,
    weights: Bundle,
    new: Bundle,
    centre: Bundle | None,
) -> Bundle:
    """A worker's own weights, replaced by an average.

    how: None: the average. A float (elastic): the weights move by this share towards
        the old centre. A pair (lr, momentum): the weights after an outer step.
    """
    values: Bundle = new
    if isinstance(how, tuple):
        values = optimizer.outer_step(group, how, centre, new)
    elif how is not None and centre is not None:
        own: Bundle = optimizer.replica(group, False)
        pairs = zip(own, centre, strict=True)
        values = tuple(mine - how * (mine - old) for mine, old in pairs)
    optimizer.take(group, values)
    return weights


def own_copy(state: Bundle, position: int) -> Tensor:
    """A copy of one of a stage's buffers for the user."""
    return state[position].clone()


def credit(done: Any) -> Tensor:
    """An empty tensor that tells that B ran and its activations are freed."""
    return torch.empty(0)


def wait(token: Tensor) -> None:
    """Delays an F with an in_flight limit until it has the credit of a B."""


drawing = threading.Lock()  # held by the thread that draws


def wanting(value: Tensor) -> Tensor:
    """The same values, for which FlexAttention's backward computes a gradient."""
    return value.detach().requires_grad_()


def seeded(target: Callable[..., Any], seed: int, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `target` with seeded default generators, of the CPU and of the devices that
    the call names, and restores them afterwards; all others stay as they are.

    Threads share the default generators, so only one such call runs at a time.
    """
    devices = devices_in((args, kwargs))
    with drawing, kept_generators(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            module = torch.get_device_module(device)
            generator = torch.Generator(device).manual_seed(seed)
            at = device if device.index is None else device.index
            module.set_rng_state(generator.get_state(), at)
        return target(*args, **kwargs)


class Seeds(NamedTuple):
    """The seeds of a job's first draw.

    own: the seed for what the microbatch draws for its rows.
    replicated: the seed for what is drawn once for all microbatches of an update.
    """

    own: int
    replicated: int


def seed(base: int, draw: int, microbatch: int, update: int = 0) -> Seeds:
    """The seeds of a job: of the step, its microbatch or update, and its draws.

    base: the number of the step. draw: how many draws of the model come before the
        job's first draw. microbatch, update: those that the job is for.
    """
    step = _splitmix64(base)
    own, replicated = _splitmix64(step ^ microbatch), _splitmix64(step ^ ~update)
    return Seeds((own >> 1) + draw, (replicated >> 1) + draw)


def draw_base() -> int:
    """A step's seed, drawn from torch's generator, which torch.manual_seed sets."""
    with drawing:
        return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


def _splitmix64(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014), which mixes 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _outside(name: str) -> RuntimeError:
    return RuntimeError(f"fxsched: {name} only runs inside a program; use the backend")


def send(value: Any, to: int, tag: int) -> None:
    """Sends a tensor or bundle to worker `to`, without waiting for that worker."""
    raise _outside("send")


def recv(source: int, tag: int) -> Any:
    """Receives a tensor or bundle that worker `source` sends under `tag`."""
    raise _outside("recv")


def fetch(source: int, tag: int) -> Bundle:
    """Receives weights that worker `source` keeps; asked for before they are needed."""
    raise _outside("fetch")


def all_reduce(
    own: Bundle, place: int, others: Sequence[tuple[int, int, int]]
) -> Bundle:
    """The sum of what several workers give, on each of them, in the memory of its own.

    place: of this worker among all that take part, in the order in which they are added
        up. others: each other worker, with the tags under which it gets what this one
        gives and this one what it gives: to the proof, the workers send each other all
        of it. These tags follow each other, those of the first worker's sends first.
    """
    raise _outside("all_reduce")


def pause(results: dict[str, Any]) -> dict[int, Tensor]:
    """Ends the call: returns the results, and waits for the outputs' gradients.

    backward() supplies the gradients.
    """
    raise _outside("pause")


def free(*values: Any) -> None:
    """Frees values after their last use on this worker."""


VALUELESS = (send, wait, free, seed, note, finite)  # give nothing to be let go
BUNDLES = (
    bundle,
    accumulate,
    reduce,
    all_reduce,
    piece,
    join,
    cast,
    encode,
    decode,
    merge_buffers,
    fetch,
    update,
    renew,
    copy,
    correct,
    replica,
    average,
    take,
)  # what gives a bundle
