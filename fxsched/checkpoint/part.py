"""A rank's part of a checkpoint: put together, and written into its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..params.full_state import mapped
from ..params.record import record_of
from .content import ModelContent, OptimizerContent, tensors_in
from .cut_weights import Whole
from .folders import sync_folder
from .manifest import File, Saved
from .tensor_files import write_tensors
from .values import (
    OWN,
    check_readable,
    fingerprint,
    random_state,
    states_of,
    write_values,
)

# an optimizer's state of one parameter: keys of tensors, and what else there is
State = tuple[list[str], dict[str, Any]]


def folder_of(rank: int) -> str:
    """The name of a rank's folder in a checkpoint."""
    return f"rank-{rank}"


class Written(NamedTuple):
    """What a rank has written, and says of it for all; see Part."""

    files: dict[str, File]
    tensors: dict[str, Saved]
    states: dict[str, State]
    model_names: tuple[str, ...]
    names: tuple[str, ...]
    tied: dict[str, str]
    common: dict[str, Any]
    prints: dict[str, int]


class Part(NamedTuple):
    """What a rank writes into its folder, and says of it for all.

    tensors: that it owns, by name. own: values for this rank alone.
    states: of the optimizer, of parameters that it speaks for.
    model_names, names: of the model's tensors; and of what else ranks must agree on.
    tied: see Manifest. common: values for all ranks; rank 0's are taken.
    prints: fingerprints of what is in extra=.
    """

    rank: int
    tensors: dict[str, Tensor]
    own: dict[str, Any]
    states: dict[str, State]
    model_names: tuple[str, ...]
    names: tuple[str, ...]
    tied: dict[str, str]
    common: dict[str, Any]
    prints: dict[str, int]

    @staticmethod
    def of(
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any] | None,
        rank: int,
        whole: Whole,
    ) -> Part:
        """A rank's. Raises PlanError for what can't be saved so.

        whole: weights that ranks have in parts.
        """
        content = ModelContent.of(model)
        tensors = {
            name: whole.values.get(tensor, tensor).detach()
            for name, tensor in content.tensors.items()
            if record_of(tensor).source == rank
        }
        modules = {name: m.get_extra_state() for name, m in content.extra.items()}
        common: dict[str, Any] = {"modules": modules, "optimizer": "", "options": {}}
        states: dict[str, dict[str, Any]] = {}
        if optimizer is not None:
            owned = OptimizerContent.of(model, optimizer)
            states = owned.states(rank, whole)
            common["optimizer"] = type(optimizer).__name__
            common["options"] = owned.options()
        extras = states_of(extra)
        others = {name: _without_tensors(state) for name, state in states.items()}
        check_readable("what get_extra_state() of the model gives", modules)
        check_readable("the optimizer's state", [common["options"], others])
        return Part(
            rank,
            tensors | tensors_in(states),
            {"random": random_state(), "extra": extras},
            others,
            tuple(content.tensors),
            (*content.tensors, *content.tied, *modules, *common["options"]),
            content.tied,
            common if rank == 0 else {},
            {name: fingerprint(each) for name, each in extras.items()},
        )

    def copied(self) -> Part:
        """The same with copies of all tensors, on the CPU, which no step changes."""

        def copy(value: Tensor) -> Tensor:
            return value.detach().to("cpu", copy=True)

        mine: dict[str, Any] = mapped(self._asdict(), copy)
        return Part(**mine)

    def write(self, checkpoint: Path) -> Written:
        """Writes it, up to the disk. Raises OSError."""
        folder = checkpoint / folder_of(self.rank)
        folder.mkdir()
        write_tensors(folder, self.tensors)
        write_values(folder / OWN, self.own)
        sync_folder(folder)
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        files = {f"{folder.name}/{path.name}": File.of(path) for path in paths}
        tensors = {name: Saved.of(t, self.rank) for name, t in self.tensors.items()}
        return Written(files, tensors, *self[3:])


def _without_tensors(state: Mapping[str, Any]) -> State:
    keys = [key for key, value in state.items() if isinstance(value, Tensor)]
    return keys, {key: value for key, value in state.items() if key not in keys}
