"""Functions of stages as graphs of the device, such as CUDA graphs.

A graph launches again what it has captured, on the same memory. Several microbatches
are in flight, so inputs are copied into that memory, and results out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ir import ops
from ..ir.garbage import no_collection
from ..ir.graphs import draws
from ..jobs.job import PlanError

MOVES = 8  # captures of a function, each after a weight has moved
BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Run = Callable[[list[Any]], Any]


def check_graphs(device: torch.device | None) -> None:
    """Raises PlanError unless a device can capture graphs; None is the CPU."""
    if device is None or not hasattr(torch.get_device_module(device), "CUDAGraph"):
        name = "the CPU" if device is None else f"device {str(device)!r}"
        raise PlanError(
            f"backend(capture='graphs'): the model's tensors are on {name}, which has "
            "no graphs; move model and batch to a GPU, or leave capture= out"
        )


class DeviceGraphs:
    """The graphs of one worker, in one pool of memory. They run one at a time.

    last: the stream on which the last one ran.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.functions: dict[Any, GraphFunction] = {}
        self.side: Any = None
        self.pool: Any = None
        self.last: Any = None

    def function(self, flat: object, run: Run, kept: dict[int, str]) -> GraphFunction:
        """The function of a flat graph, the same for all microbatches.

        kept: the positions of weights, and their names in the program.
        """
        new = GraphFunction(self, run, tuple(kept))
        return self.functions.setdefault((id(flat), *kept.items()), new)

    def follow(self) -> None:
        """The present stream runs after the last graph, whose memory is used again."""
        present = self.module.current_stream(self.device)
        if self.last is not None and self.last != present:
            present.wait_stream(self.last)
        self.last = present

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A stream beside the present one, which waits for it before and after; the
        host doesn't: the device may wait for a message of another rank.

        No other thread draws or captures meanwhile: the device's generator takes part
        in a capture.
        """
        module = self.module
        self.side = self.side or module.Stream(self.device)
        present = module.current_stream(self.device)
        with ops.drawing, no_collection():
            self.side.wait_stream(present)
            with module.stream(self.side):
                yield
            present.wait_stream(self.side)

    def capture(self, launch: Callable[[], Sequence[Any]]) -> tuple[Any, Sequence[Any]]:
        """A graph of what `launch` launches to the present stream, and its results."""
        self.pool = self.pool or self.module.graph_pool_handle()
        graph = self.module.CUDAGraph()
        graph.capture_begin(self.pool, capture_error_mode="thread_local")
        try:
            results = launch()
        finally:
            graph.capture_end()
        return graph, results


class GraphFunction:
    """A function of one list, captured at its second call, and when a weight has moved.

    run: what is captured. kept: positions of weights, which are read in place; and of
        numbers on the host, which are part of a graph.
    fixed: whether it launches the same at each call, once that is known.
    """

    def __init__(self, graphs: DeviceGraphs, run: Run, kept: tuple[int, ...]) -> None:
        self.graphs, self.run, self.kept = graphs, run, kept
        self.fixed: bool | None = None
        self.captured: Captured | None = None
        self.moves = 0

    def __call__(
        self, given: list[Any], plain: Run | None = None, added: tuple[int, ...] = ()
    ) -> Any:
        """plain: what runs where no graph does. added: positions of results that are
        added to sums, the last that are given, instead of being returned."""
        inputs, plain = given[: len(given) - len(added)], plain or self.run
        if self.fixed is None:
            with Watch() as watch:
                results = plain(given)
            self.fixed = watch.fixed
            return results
        if not self.fixed or not self._fits(inputs):
            return plain(given)
        places = [_place(inputs[i]) for i in self.kept]
        if self.captured is None or self.captured.places != places:
            if self.moves == MOVES:
                return plain(given)
            self.graphs.follow()
            self.moves += 1
            self.captured = self._capture(inputs, places)
        sums = given[len(inputs) :]
        given.clear()
        self.graphs.follow()
        return self.captured(inputs, sums, added)

    def _fits(self, inputs: list[Any]) -> bool:
        """Whether a graph can run on inputs: tensors as those that were captured, of
        the device or numbers, and no element lies where another does."""
        if self.captured is not None:
            return self.captured.kinds == [(x.stride(), x.device) for x in inputs]
        for i, x in enumerate(inputs):
            if not isinstance(x, Tensor) or any(
                n > 1 and not s for n, s in zip(x.shape, x.stride(), strict=True)
            ):
                return False
            if x.device != self.graphs.device and x.dim():
                return False
            if x.device != self.graphs.device and i not in self.kept:
                self.kept = (*self.kept, i)
        return True

    def _capture(self, inputs: Sequence[Tensor], places: list[Any]) -> Captured:
        """Captures it on inputs, after a run to warm up."""
        graphs, static = self.graphs, [*inputs]
        copied = [i for i in range(len(inputs)) if i not in self.kept]
        with torch.inference_mode(False), torch.no_grad(), graphs.beside():
            for i in copied:
                x = inputs[i]
                new = x.new_empty_strided(x.shape, x.stride())
                static[i] = new.copy_(x)
            try:
                self.run([*static])
                graph, results = graphs.capture(lambda: self.run([*static]))
            except RuntimeError as error:
                why = str(error.__context__ or error).partition("\n")[0]
                raise PlanError(
                    f"backend(capture='graphs'): a stage can't be captured ({why}); "
                    "leave capture= out"
                ) from error
        return Captured(graph, places, static, copied, results)


class Captured:
    """A graph with the memory that it reads and writes.

    places: of weights, see _place; it keeps none of them. static: its inputs, which
        begin at `begins` of their memory. copied: positions of those that are copied
        into it. view_of: of which input each result is a view, if of any.
    whole: all of the memory that results lie in.
    """

    def __init__(
        self,
        graph: Any,
        places: list[Any],
        static: list[Tensor],
        copied: list[int],
        results: Sequence[Tensor],
    ) -> None:
        self.graph, self.places, self.copied = graph, places, copied
        self.begins = [x.storage_offset() for x in static]
        self.results, self.memory = results, [*map(_memory, results)]
        self.into = [static[i] for i in copied]
        self.kinds = [(x.stride(), x.device) for x in static]
        inputs = {_memory(x): i for i, x in enumerate(static) if x.numel()}
        self.view_of = [inputs.get(memory) for memory in self.memory]
        self.whole: dict[Any, Tensor] = {}
        for memory in self.memory:
            own = [x for x in results if _memory(x) == memory]
            begin = min(x.storage_offset() for x in own)
            size = max(x.storage_offset() + _extent(x) for x in own) - begin
            self.whole[memory] = own[0].as_strided((size,), (1,), begin)

    def __call__(
        self, inputs: list[Tensor], sums: list[Tensor], added: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Replays it. Views of inputs are made anew; results that share memory share
        their copy."""
        if self.into:
            torch._foreach_copy_(self.into, [inputs[i] for i in self.copied])
        self.graph.replay()
        if added:
            torch._foreach_add_(sums, [self.results[i] for i in added])
        copies: dict[Any, Tensor] = {}
        given = []
        for i, (x, memory) in enumerate(zip(self.results, self.memory, strict=True)):
            if i in added:
                continue
            if (source := self.view_of[i]) is not None:
                begin, base = self.begins[source], inputs[source]
            else:
                begin = self.whole[memory].storage_offset()
                if memory not in copies:
                    copies[memory] = self.whole[memory].clone()
                base = copies[memory]
            shift = x.storage_offset() - begin + base.storage_offset()
            given.append(base.as_strided(x.shape, x.stride(), shift))
        return tuple(given)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether operations launch the same at each call.

    fixed: none draws random numbers, or asks for values to know what to launch.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tags = BY_VALUES & {*getattr(func, "tags", BY_VALUES)}
        if "index" in str(func):  # by numbers, unless there is a mask
            tags -= {torch.Tag.dynamic_output_shape}
            given = tree_leaves((args[1:], kwargs))
            masks = (isinstance(x, Tensor) and x.dtype is torch.bool for x in given)
            self.fixed &= not any(masks)
        self.fixed &= not (tags or draws(func, args, kwargs))
        self.fixed &= getattr(func, "namespace", "") != "fxsched"
        return func(*args, **kwargs)


def _place(x: Tensor) -> Any:
    """The address of a weight, or a number on the host."""
    return x.item() if x.device.type == "cpu" else x.data_ptr()


def _memory(x: Tensor) -> tuple[int, torch.dtype]:
    """The memory of a tensor; of its type, in which it is copied."""
    return x.untyped_storage().data_ptr(), x.dtype


def _extent(x: Tensor) -> int:
    """From its first to its last element."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return 1 + sum((n - 1) * s for n, s in pairs) if x.numel() else 0
