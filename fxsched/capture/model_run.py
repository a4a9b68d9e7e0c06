"""A model's own Python, run once while torch.export traces it, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import nn

from .drawn_numbers import refuse_seeding
from .model_values import noted_model
from .noted_values import Change, Noted
from .outside_names import OutsideNames, first_frames
from .own_gradients import no_own_gradients
from .structure import Structure
from .torch_calls import Returns, TorchCalls


class ModelRun:
    """Runs a model for a call, (args, kwargs), with others in the place of its tensors.

    result: what it returned. returns: what the graph is to give of it.
    changes: what it wrote into itself and around it, which was undone.
    outside: what it read around it. calls: what it called of torch.
    """

    result: Structure
    returns: Returns
    changes: Sequence[Change] = ()

    def __init__(self, model: nn.Module, call: Structure) -> None:
        self.model, self.call = model, call
        self.before = Noted()
        self.outside, self.calls = OutsideNames(), TorchCalls()

    def __call__(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        args, kwargs = self.call.with_tensors(tensors)
        self.before = noted_model({"self": self.model})
        try:
            with no_own_gradients(), self.calls, first_frames(self._look):
                result = self.result = Structure(self.model(*args, **kwargs))
            self.returns = self.calls.returned(result.tensors, result.names)
        finally:
            self.changes = [*self.before.changes(), *self.outside.changes()]
            self.outside.settle()
            for change in reversed(self.changes):
                change.undo()
        return tuple(self.returns.values)

    def _look(self, frame: FrameType) -> None:
        self.outside.look(frame)
        refuse_seeding(frame)

    def path_of(self, weight: nn.Parameter) -> str | None:
        """How the model writes a weight that it doesn't register."""
        for path, module in self.outside.modules.items():
            for name, each in module.named_parameters(path):
                if each is weight:
                    return name
        return self.before.path_of(weight) or self.outside.path_of(weight)
