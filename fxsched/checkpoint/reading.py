"""A checkpoint that was found to fit, and what a rank takes of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..jobs.job import PlanError
from ..params.cut_weights import put
from ..params.lazy import load_later, make_all, unmade
from ..params.optimizer_steps import cut_state
from ..params.record import Lazy, Parts, record_of
from ..params.released import is_given_up
from .content import MODEL, STATE, ModelContent, OptimizerContent, tensors_in
from .coordinator import Coordinator
from .fit import check_alike, check_names, tied_here
from .manifest import Manifest
from .part import State, folder_of
from .tensor_files import read_tensors
from .values import COMMON, OWN, check_named, read_values, set_random_state

Places = dict[str, list[Tensor]]


class Reading(NamedTuple):
    """What a rank takes of a checkpoint.

    places: tensors to read into, by their names there.
    cut: weights that ranks have in parts, by their names there.
    later: tensors that aren't made yet, by their names there; they are read when they
        are, and the optimizer's state of them too.
    options, states: of the optimizer, by names of parameters; states are in places.
    own: the rank's own values.
    """

    folder: Path
    manifest: Manifest
    model: ModelContent
    optimizer: OptimizerContent | None
    extra: Mapping[str, Any]
    places: dict[str, list[Tensor]]
    cut: dict[str, list[Parts]]
    later: dict[str, list[tuple[Tensor, Lazy]]]
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
        coordinator: Coordinator,
    ) -> Reading:
        """What a rank takes. Raises PlanError for what doesn't fit or is damaged."""
        manifest = Manifest.read(folder)
        content = ModelContent.of(model)
        places, cut, later = _places(content, manifest)
        same = coordinator.ranks == manifest.workers
        own_file = f"{folder_of(coordinator.rank if same else 0)}/{OWN}"
        manifest.check_files(folder, [COMMON, own_file])
        common, own = read_values(folder / COMMON), read_values(folder / own_file)
        check_names("extra state", content.extra, common["modules"])
        check_extra(extra, own["extra"], () if same else manifest.apart, manifest)
        stepped, states = None, {}
        if optimizer is not None:
            stepped = OptimizerContent.of(model, optimizer)
            check_optimizer(stepped, common)
            wanted = [
                name
                for name in stepped.updated(coordinator.rank)
                if not _comes_later(stepped.parameters[name])
            ]
            states = _states(wanted, common["states"], manifest)
            places |= {key: [value] for key, value in tensors_in(states).items()}
        every = later or cut  # of states, too
        names = manifest.tensors if every else places
        ranks = sorted({manifest.tensors[name].rank for name in names})
        folders = tuple(f"{folder_of(rank)}/" for rank in ranks)
        data = [f for f in manifest.files if f.startswith(folders) and f[-6:] != OWN]
        manifest.check_files(folder, data)
        return Reading(
            *(folder, manifest, content, stepped, extra, places, cut, later),
            *(common, states, own, same),
        )

    def take(self) -> dict[str, Any]:
        """Takes it; what is in the checkpoint's extra= besides."""
        self._read({name: tensors[0] for name, tensors in self.places.items()})
        with torch.no_grad():
            for first, *others in self.places.values():
                for tensor in others:  # tied when it was saved, and not here
                    tensor.copy_(first)
        for name, module in self.model.extra.items():
            module.set_extra_state(self.common["modules"][name])
        if self.optimizer is not None:
            self.optimizer.load(self.common["options"], self.states)
        self._take_parts()
        self._put_off()
        for name, each in self.extra.items():
            each.load_state_dict(self.own["extra"][name])
        set_random_state(self.own["random"])
        left = () if self.whole else self.manifest.apart
        return {
            name: each
            for name, each in self.own["extra"].items()
            if name not in self.extra and name not in left
        }

    def _read(self, tensors: Mapping[str, Tensor]) -> None:
        """Reads into tensors, by their names in the checkpoint."""
        for rank in sorted({its.rank for its in self.manifest.tensors.values()}):
            here = {
                name: tensor
                for name, tensor in tensors.items()
                if self.manifest.tensors[name].rank == rank
            }
            if here:
                read_tensors(self.folder / folder_of(rank), here)

    def _take_parts(self) -> None:
        """Reads weights that ranks have in parts, one after another, and then the
        optimizer's state of each."""
        for name, weights in self.cut.items():
            for parts in weights:
                put(parts, self._value(name))
        if self.optimizer is not None:
            for name, parameter in self.optimizer.parameters.items():
                own = record_of(parameter).parts
                if own is not None and own.kept:
                    self._take_state(self.optimizer, name)
                    cut_state(self.optimizer.optimizer)

    def _put_off(self) -> None:
        """Has what isn't made yet read later, and the optimizer's state of it."""
        stepped = self.optimizer
        names = {} if stepped is None else {p: n for n, p in stepped.parameters.items()}
        for name, tensors in self.later.items():
            for tensor, lazy in tensors:
                then = None
                if stepped is not None and tensor in names:
                    then = partial(self._take_state, stepped, names[tensor])
                load_later(tensor, lazy, partial(self._value, name), then)
        if stepped is not None and self.later:
            every = [tensor for each in self.later.values() for tensor, _ in each]

            def make_first(*_: object) -> None:
                make_all(every)

            stepped.optimizer.register_state_dict_pre_hook(make_first)
            stepped.optimizer.register_load_state_dict_pre_hook(make_first)

    def _value(self, name: str) -> Tensor:
        """A tensor of the checkpoint."""
        tensor = self.manifest.tensors[name].empty()
        self._read({name: tensor})
        return tensor

    def _take_state(self, stepped: OptimizerContent, name: str) -> None:
        """Takes the optimizer's state of a parameter, if there is any."""
        states = _states([name], self.common["states"], self.manifest)
        for state in states.values():
            self._read(tensors_in(states))
            stepped.take(name, state)


def _comes_later(parameter: Tensor) -> bool:
    """Whether the optimizer's state of a parameter is read once all else is."""
    return bool(unmade(parameter) or record_of(parameter).parts)


def _places(
    content: ModelContent, manifest: Manifest
) -> tuple[Places, dict[str, list[Parts]], dict[str, list[tuple[Tensor, Lazy]]]]:
    """The model's tensors here, by the names of what goes there in a checkpoint: those
    that are made, those that ranks have in parts, and those that aren't made yet."""
    saved = {n: its for n, its in manifest.tensors.items() if n.startswith(MODEL)}
    names = {n: n for n in saved} | manifest.tied
    check_names("tensor", [*content.tensors, *content.tied], names)
    for name, first in content.tied.items():
        if names[name] != names[first]:
            raise tied_here(name, first)
    places = Places()
    cut: dict[str, list[Parts]] = {}
    later: dict[str, list[tuple[Tensor, Lazy]]] = {}
    for name, tensor in content.tensors.items():
        check_alike(name, saved[names[name]], tensor)
        if parts := record_of(tensor).parts:
            cut.setdefault(names[name], []).append(parts)
        elif lazy := unmade(tensor):
            later.setdefault(names[name], []).append((tensor, lazy))
        elif not is_given_up(tensor):
            places.setdefault(names[name], []).append(tensor.detach())
    return places, cut, later


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
    check_named(extra)
    for name, each in extra.items():
        if name not in saved:
            raise PlanError(
                f"load: the checkpoint has no extra[{name!r}], only {sorted(saved)}; "
                "leave it out of extra="
            )
        if not hasattr(each, "load_state_dict"):
            raise PlanError(
                f"load: extra[{name!r}] is a {type(each).__name__}, without "
                "load_state_dict(); leave it out: load returns its value"
            )
        if name in apart:
            raise PlanError(
                f"load: extra[{name!r}] was saved with a different value on each of "
                f"{manifest.workers} ranks, which fxsched can't give to another number "
                f"of ranks; leave it out, or load on {manifest.workers} ranks"
            )
