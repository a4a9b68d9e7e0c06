"""Modes of the thread that tracing a model turns on and off again, node by node."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def _kinds() -> list[str]:
    """The kinds of devices that autocast may be on for."""
    device = torch.accelerator.current_accelerator()
    own = "cuda" if device is None else device.type
    return list(dict.fromkeys(("cpu", "cuda", own)))


def casts() -> list[tuple[str, torch.dtype]]:
    """The kinds of devices that autocast is on for, each with the type that it casts
    to."""
    return [
        (kind, torch.get_autocast_dtype(kind))
        for kind in _kinds()
        if torch.is_autocast_enabled(kind)
    ]


def trace_modes() -> Iterator[str]:
    """What of torch's settings changes which operations a trace has."""
    yield f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {casts()}"
    yield f"{torch.get_default_dtype()} {torch.get_default_device()}"
    yield f"{torch.are_deterministic_algorithms_enabled()}"
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    yield f"{mkldnn.matmul.fp32_precision} {mkldnn.enabled}"
    yield (
        f"{cuda.flash_sdp_enabled()} {cuda.mem_efficient_sdp_enabled()} "
        f"{cuda.math_sdp_enabled()} {cuda.cudnn_sdp_enabled()} "
        f"{cuda.matmul.fp32_precision} {cudnn.conv.fp32_precision} {cudnn.enabled}"
    )


@contextmanager
def with_casts(casts_then: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Autocast as `casts` said that it was."""
    then = dict(casts_then)
    with ExitStack() as stack:
        for kind in _kinds():
            if then.get(kind) != dict(casts()).get(kind):
                on = kind in then
                stack.enter_context(torch.autocast(kind, then.get(kind), enabled=on))
        yield


@contextmanager
def unlogged() -> Iterator[None]:
    """Keeps what fake tensors log of calls that raise, as some that are tried do, from
    the user's screen."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def modes_after_errors() -> Iterator[None]:
    """Where a model is traced or planned: outside of torch.inference_mode, in which
    composite operations come whole, and of detect_anomaly, which looks at gradients of
    tensors that have no values.

    After an error inside, gradients and autocast are as they were before: a model's
    regions are entered by one node and left by another, which may never have run.
    """
    gradients, nested = torch.is_grad_enabled(), _nested()
    before = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _kinds()
    ]
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(gradients),
            torch.autograd.set_detect_anomaly(False),
        ):
            yield
    except BaseException:
        torch.set_grad_enabled(gradients)
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(_nested() - nested):
            torch.autocast_decrement_nesting()
        if not nested:
            torch.clear_autocast_cache()  # else casts of weights would outlive a step
        raise


def _nested() -> int:
    """How many autocast regions are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
