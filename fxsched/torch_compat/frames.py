"""What happens around each frame that Dynamo compiles, and its settings meanwhile.

Dynamo has no hook there (its callbacks come after the limit is checked, and are skipped
while another thread compiles), so this stands around the function that compiles a
frame. Frames of other backends are compiled as before.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config
from torch._dynamo import convert_frame

from ..jobs.job import PlanError
from .patched import replace_once
from .tracebacks import shortened

Around = Callable[[dict[str, Any]], AbstractContextManager[None] | None]


def around_frames(ours: Around) -> None:
    """Compiles each frame inside of what `ours` gives for the arguments of the function
    that does, which it may change; as they are, where it gives None."""
    parameters = inspect.signature(convert_frame._compile)

    def compile_frame(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        around = ours(bound.arguments)
        if around is None:
            return original(*args, **kwargs)
        try:
            with around:
                return original(*bound.args, **bound.kwargs)
        except PlanError as error:
            raise shortened(error)  # noqa: B904

    replace_once((convert_frame,), "_compile", compile_frame)


def forget(is_own: Callable[[Any], bool]) -> None:
    """Takes backends out of those that Dynamo keeps for good, and whose reset() it
    calls in its own: fxsched's is one that all ranks call together."""
    known = torch._dynamo.eval_frame.cached_backends
    for key, wrapper in list(known.items()):
        if is_own(wrapper):
            del known[key]


@contextmanager
def settings() -> Iterator[None]:
    """Dynamo's settings for models that fxsched plans, in this thread.

    Sweeping over schedules compiles one model often; past its limit Dynamo would go on
    in eager mode with no more than a warning.
    """
    config: Any = torch._dynamo.config
    silenced = "ignore_logging_functions"  # since torch 2.13
    ignored = {}
    if hasattr(config, silenced):
        # a warning would break the graph, such as create_block_mask's
        ignored[silenced] = {*getattr(config, silenced), warnings.warn}
    shapes: Any = torch.fx.experimental._config
    with (
        config.patch(
            recompile_limit=max(config.recompile_limit, 1024),
            accumulated_recompile_limit=max(config.accumulated_recompile_limit, 8192),
            fail_on_recompile_limit_hit=True,
            # a number in the call is a constant of the plan; a changing one is better
            # a tensor
            specialize_float=True,
            allow_rnn=True,
            # a hook that is added after the first call is another model
            skip_nnmodule_hook_guards=False,
            **ignored,
        ),
        # lengths that happen to equal the batch size must not share its symbol
        shapes.patch(use_duck_shape=False),
    ):
        yield
