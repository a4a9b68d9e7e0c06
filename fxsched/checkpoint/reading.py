"""A checkpoint that was found to fit, and what a rank takes of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..jobs.job import PlanError
from ..state.ownership import is_given_up
from .content import MODEL, STATE, ModelContent, OptimizerContent
from .fit import check_alike, check_names, tied_here
from .manifest import Manifest
from .part import State, folder_of
from .party import Party
from .tensor_files import read_tensors
from .values import COMMON, OWN, read_values, set_random_state


class Reading(NamedTuple):
    """What a rank takes of a checkpoint.

    places: tensors to read into, by their names there.
    options, states: of the optimizer, by names of parameters; states are in places.
    own: the rank's own values.
    """

    folder: Path
    manifest: Manifest
    model: ModelContent
    optimizer: OptimizerContent | None
    extra: Mapping[str, Any]
    places: dict[str, list[Tensor]]
    common: dict[str, Any]
    states: dict[str, dict[str, Any]]
    own: dict[str, Any]
    whole: bool  # whether what is in extra= is this rank's

    @staticmethod
    def of(
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any],
        party: Party,
    ) -> Reading:
        """What a rank takes. Raises PlanError for what doesn't fit or is damaged."""
        manifest = Manifest.read(folder)
        content = ModelContent.of(model)
        places = _places(content, manifest)
        same = party.ranks == manifest.workers
        own_file = f"{folder_of(party.rank if same else 0)}/{OWN}"
        manifest.check_files(folder, [COMMON, own_file])
        common, own = read_values(folder / COMMON), read_values(folder / own_file)
        check_names("extra state", content.extra, common["modules"])
        check_extra(extra, own["extra"], () if same else manifest.apart, manifest)
        stepped, states = None, {}
        if optimizer is not None:
            stepped = OptimizerContent.of(model, optimizer)
            check_optimizer(stepped, common)
            wanted = stepped.updated(party.rank)
            states = _states(wanted, common["states"], manifest)
            places |= {
                f"{STATE}{name}.{key}": [value]
                for name, state in states.items()
                for key, value in state.items()
                if key in common["states"][name][0]
            }
        ranks = sorted({manifest.tensors[name].rank for name in places})
        folders = tuple(f"{folder_of(rank)}/" for rank in ranks)
        data = [f for f in manifest.files if f.startswith(folders) and f[-6:] != OWN]
        manifest.check_files(folder, data)
        return Reading(
            *(folder, manifest, content, stepped, extra),
            *(places, common, states, own, same),
        )

    def take(self) -> dict[str, Any]:
        """Takes it; what is in the checkpoint's extra= besides."""
        for rank in sorted({its.rank for its in self.manifest.tensors.values()}):
            here = {
                name: tensors[0]
                for name, tensors in self.places.items()
                if self.manifest.tensors[name].rank == rank
            }
            if here:
                read_tensors(self.folder / folder_of(rank), here)
        with torch.no_grad():
            for first, *others in self.places.values():
                for tensor in others:  # tied when it was saved, and not here
                    tensor.copy_(first)
        for name, module in self.model.extra.items():
            module.set_extra_state(self.common["modules"][name])
        if self.optimizer is not None:
            self.optimizer.load(self.common["options"], self.states)
        for name, each in self.extra.items():
            each.load_state_dict(self.own["extra"][name])
        set_random_state(self.own["random"])
        left = () if self.whole else self.manifest.apart
        return {
            name: each
            for name, each in self.own["extra"].items()
            if name not in self.extra and name not in left
        }


def _places(content: ModelContent, manifest: Manifest) -> dict[str, list[Tensor]]:
    """The model's tensors here, by the names of what goes there in a checkpoint."""
    saved = {n: its for n, its in manifest.tensors.items() if n.startswith(MODEL)}
    names = {n: n for n in saved} | manifest.tied
    check_names("tensor", [*content.tensors, *content.tied], names)
    for name, first in content.tied.items():
        if names[name] != names[first]:
            raise tied_here(name, first)
    places: dict[str, list[Tensor]] = {}
    for name, tensor in content.tensors.items():
        check_alike(name, saved[names[name]], tensor)
        if not is_given_up(tensor):
            places.setdefault(names[name], []).append(tensor.detach())
    return places


def _states(
    wanted: Collection[str], states: Mapping[str, State], manifest: Manifest
) -> dict[str, dict[str, Any]]:
    """The optimizer's states of some parameters, their tensors yet to be read."""
    return {
        name: {key: manifest.tensors[f"{STATE}{name}.{key}"].empty() for key in keys}
        | others
        for name, (keys, others) in states.items()
        if name in wanted
    }


def check_optimizer(optimizer: OptimizerContent, common: Mapping[str, Any]) -> None:
    """Raises PlanError unless a checkpoint is of such an optimizer."""
    name = type(optimizer.optimizer).__name__
    if common["optimizer"] != name:
        its = common["optimizer"] or "no optimizer"
        raise PlanError(
            f"load: the checkpoint has the state of {its}, not of {name}; load with "
            "the optimizer that was saved, or leave optimizer= out"
        )
    check_names("parameter that is stepped,", optimizer.parameters, common["options"])


def check_extra(
    extra: Mapping[str, Any],
    saved: Mapping[str, Any],
    apart: Collection[str],
    manifest: Manifest,
) -> None:
    """Raises PlanError for what can't be loaded of extra=."""
    for name, each in extra.items():
        if name not in saved:
            raise PlanError(
                f"load: the checkpoint has no extra[{name!r}], but {sorted(saved)}; "
                "leave it out"
            )
        if not hasattr(each, "load_state_dict"):
            raise PlanError(
                f"load: extra[{name!r}] is a {type(each).__name__}, without "
                "load_state_dict(); leave it out: load returns its value"
            )
        if name in apart:
            raise PlanError(
                f"load: extra[{name!r}] was another on each of {manifest.workers} "
                "ranks, and can't be shared out to other workers; leave it out, or "
                f"load with {manifest.workers}"
            )
