"""What is saved of a model and its optimizer: tensors by name, and the rank of each.

model.embed.weight                     as model.state_dict() names it
optimizer.state.embed.weight.exp_avg   by the parameter's name, not its number
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..jobs.job import PlanError
from ..params.full_state import module_of, optimized, plain_name
from ..params.optimizer_steps import unguarded
from ..params.record import record_of
from .cut_weights import Whole

MODEL, STATE = "model.", "optimizer.state."
EXTRA_STATE = "_extra_state"  # how torch ends names of what get_extra_state() returns
NO_OPTIONS = ("params", "param_names")


class ModelContent(NamedTuple):
    """What a model's state_dict() has.

    tensors: by name, each once. tied: names of the same tensor, and that one's name.
    extra: modules with get_extra_state(), by name.
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    extra: dict[str, nn.Module]

    @staticmethod
    def of(model: nn.Module) -> ModelContent:
        """That of a model, compiled or not.

        Raises PlanError for tensors that a hook of state_dict() makes.
        """
        module = module_of(model)
        content = ModelContent({}, {}, {})
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        names: dict[int, str] = {}
        for full_name, value in module.state_dict(keep_vars=True).items():
            name = MODEL + plain_name(full_name)
            owner, _, last = full_name.rpartition(".")
            if last == EXTRA_STATE:
                content.extra[name] = module.get_submodule(owner)
            elif id(value) not in own:
                raise PlanError(
                    f"{name.removeprefix(MODEL)} in the model's state_dict() is made "
                    "by a hook, and is neither a parameter nor a buffer; save "
                    "fxsched.full_state_dict(model) by torch.save instead"
                )
            elif (first := names.setdefault(id(value), name)) != name:
                content.tied[name] = first
            else:
                content.tensors[name] = value
        return content


class OptimizerContent(NamedTuple):
    """An optimizer's parameters, by name, in the order of its groups."""

    optimizer: Optimizer
    parameters: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> OptimizerContent:
        """That of a model's. Raises PlanError for parameters of something else."""
        if not isinstance(optimizer, Optimizer):
            raise PlanError(
                f"optimizer= is a {type(optimizer).__name__}, not a "
                "torch.optim.Optimizer; give the optimizer, and other objects that "
                "have a state_dict() in extra="
            )
        parameters = optimized(model, optimizer)
        named = module_of(model).named_parameters()
        names = {id(parameter): plain_name(name) for name, parameter in named}
        foreign = [p for p in parameters if id(p) not in names]
        foreign += [p for p in optimizer.state if id(p) not in names]
        if foreign:
            raise PlanError(
                f"the optimizer has {len(foreign)} parameters that aren't in the "
                "model; give a module that has all parameters of the optimizer"
            )
        return OptimizerContent(optimizer, {names[id(p)]: p for p in parameters})

    def states(self, rank: int, whole: Whole) -> dict[str, dict[str, Any]]:
        """The state of parameters that this rank speaks for, by their names.

        whole: of weights that ranks have in parts.
        """
        states = {**self.optimizer.state, **whole.states}
        return {
            name: dict(states[parameter])
            for name, parameter in self.parameters.items()
            if parameter in states and record_of(parameter).speaker == rank
        }

    def updated(self, rank: int) -> list[str]:
        """Names of the parameters whose state this rank keeps."""
        return [n for n, p in self.parameters.items() if record_of(p).is_updated(rank)]

    def options(self) -> dict[str, dict[str, Any]]:
        """The options of each parameter's group, such as its learning rate."""
        names = iter(self.parameters)
        return {
            next(names): options
            for group in self.optimizer.param_groups
            for options in [{k: v for k, v in group.items() if k not in NO_OPTIONS}]
            for _ in group["params"]
        }

    def load(
        self,
        options: Mapping[str, Mapping[str, Any]],
        states: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Takes options and states by names of parameters, those that it keeps."""
        numbers = {name: number for number, name in enumerate(self.parameters)}
        with unguarded(self.optimizer):
            groups = self.optimizer.state_dict()["param_groups"]
        names = list(self.parameters)
        for group in groups:
            group.update(_shared([options[names[n]] for n in group["params"]]))
        state = {numbers[name]: dict(each) for name, each in states.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for name, each in states.items():
            _keep_types(self.optimizer.state[self.parameters[name]], each)

    def take(self, name: str, state: dict[str, Any]) -> None:
        """Takes the state of one parameter."""
        self.optimizer.state[self.parameters[name]] = state


def tensors_in(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Tensors of an optimizer's states, by their names in a checkpoint."""
    return {
        f"{STATE}{name}.{key}": value
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def _shared(options: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What parameters of one group have in common, which is to be all."""
    first = dict(options[0]) if options else {}
    for other in options:
        apart = [key for key in first if other.get(key) != first[key]]
        if apart:
            raise PlanError(
                "load: parameters of one of the optimizer's param_groups were saved "
                f"with different values of {apart[0]}; make the param_groups as they "
                "were when saved"
            )
    return first


def _keep_types(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Undoes what Optimizer.load_state_dict does to types: it makes states of the
    parameter's, also where they had more bits."""
    for key, value in saved.items():
        if isinstance(value, Tensor) and state[key].dtype != value.dtype:
            state[key] = value.to(state[key].device)
