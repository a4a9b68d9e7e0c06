"""Constructors run, and what they do to tensors is recorded instead of done.

Tensors made meanwhile are ordinary ones, whose memory is reserved and not touched; the
operating system gives none for it. What is small and not random is done at once, so
that constructors may look at it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..jobs.job import PlanError
from .draws import draw
from .tape import Constant, Operation, Place, Tape, is_recorded, tensors_in

SMALL = 1 << 16  # bytes
EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
# what writes all of its first argument, and doesn't read it
OVERWRITES = ("uniform_", "normal_", "fill_", "zero_", "copy_")
UNLIKE_META = ("_linalg_svd",)  # strides of its results aren't those on meta
# what reads a tensor's memory, or gives it away, without an operation
PEEKS = (
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr),
    *(Tensor.__reduce_ex__, Tensor.share_memory_, Tensor.storage, Tensor.__dlpack__),
    Tensor.untyped_storage,
)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations on a tape.

    draws: whether random numbers are to be known in the end.
    pending: numbers of storages whose values only the tape has.
    shared: those whose memory others have, and may read or write.
    """

    def __init__(self, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.draws = draws
        self.pending: set[int] = set()
        self.shared: set[int] = set()
        self.on = True
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage."""
        storage = memory_of(tensor)
        known = self._numbers.get(storage._cdata)
        if known is None or is_gone(known[0]):
            reference: Any = StorageWeakRef
            known = reference(storage), self.tape.storage(storage.nbytes())
            self._numbers[storage._cdata] = known
        number = known[1]
        self.tape.sizes[number] = max(self.tape.sizes[number], storage.nbytes())
        return number

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor lies."""
        if tensor.is_conj() or tensor.is_neg():
            raise PlanError(
                f"deferred(): a tensor of shape {list(tensor.shape)} is a conjugate or "
                "negative view, which deferred() can't record; use .resolve_conj() or "
                ".resolve_neg()"
            )
        return Place(
            self.number(tensor),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )

    def alive(self) -> dict[int, StorageWeakRef]:
        """Pending storages that something still holds."""
        return {
            number: reference
            for reference, number in self._numbers.values()
            if number in self.pending and not is_gone(reference)
        }

    @staticmethod
    def storage(reference: StorageWeakRef) -> Any:
        """A storage that something holds."""
        return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)

    def fill(self, number: int, storage: Any) -> None:
        """Does what is pending on a storage, in its own memory."""
        if number not in self.pending:
            return
        self.on = False
        try:
            made = self.tape.make(self.tape.needed([number]), [number])[number]
            storage.copy_(made)
        finally:
            self.on = True
        self.pending.discard(number)

    def fill_memory(self, tensor: Tensor) -> None:
        """Gives a tensor the values that are pending."""
        self.fill(self.number(tensor), memory_of(tensor))

    def share(self, tensor: Tensor) -> None:
        """Gives a tensor the values that are pending, and those to come at once."""
        self.fill_memory(tensor)
        self.shared.add(self.number(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if not self.on or _on_meta(func, tensors, kwargs):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.inplace_view in func.tags or _is_view(func):
            self._check_kept(name, tensors)
            return func(*args, **kwargs)
        if name in EMPTY:
            return func(*args, **kwargs)
        generator = _generator(func, args, kwargs)
        results = None
        if name not in UNLIKE_META and not any(
            self.number(each) in self.shared for each in written
        ):
            results = _results(func, args, kwargs)
        if results is None:  # it depends on values, or is seen by others
            if generator is not None and not self.draws:
                raise PlanError(
                    f"deferred(draws=False): {func} must draw its numbers at once, "
                    "because its result depends on values, or shares memory; leave "
                    "draws=False out"
                )
            for each in tensors:
                self.fill_memory(each)
            return func(*args, **kwargs)
        waits = (
            generator is not None
            or any(self.number(each) in self.pending for each in tensors)
            or any(each.nbytes > SMALL for each in (*written, *tensors_in(results)))
        )
        if not waits:
            return func(*args, **kwargs)
        return self._record(func, args, kwargs, written, results, generator)

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        written: list[Tensor],
        results: Any,
        generator: torch.Generator | None,
    ) -> Any:
        """Puts an operation on the tape; what it returns, without values."""
        name = func._schema.name.removeprefix("aten::")
        others = {self.number(each) for each in tensors_in((args[1:], kwargs))}
        for each in written:
            part = each.nbytes < memory_of(each).nbytes()
            if part or name not in OVERWRITES or self.number(each) in others:
                self._keep(each)
        self.pending |= {self.number(each) for each in written}
        its, named = tree_map(self._argument, (args, kwargs))
        result = tree_map(_without_values, results)
        own = {id(each) for each in written}
        made = [
            self.place(each)
            if isinstance(each, Tensor) and id(each) not in own
            else None
            for each in tree_leaves(result)
        ]
        numbers = {each.storage for each in made if each is not None}
        numbers |= {self.number(each) for each in written}
        arguments = tree_leaves((its, named), is_leaf=is_recorded)
        reads = {each.storage for each in arguments if isinstance(each, Place)}
        operation = Operation(func, its, named, tuple(made), reads, numbers, generator)
        self.tape.add(operation)
        self.pending |= numbers
        if generator is not None and self.draws:
            operation.state = generator.get_state()
            draw(self.tape, operation)
        return result

    def _keep(self, tensor: Tensor) -> None:
        """Puts what is in a storage on the tape, before a first write there waits."""
        number = self.number(tensor)
        if number in self.pending:
            return
        content = torch.empty(0, dtype=torch.uint8).set_(memory_of(tensor))
        place = self.place(content)
        first: Any = torch.ops.aten.zero_.default
        args: tuple[Any, ...] = (place,)
        if content.any():  # not new: reading that takes no memory
            first, args = torch.ops.aten.copy_.default, (place, Constant.of(content))
        self.tape.add(Operation(first, args, {}, (None,), set(), {number}))
        self.pending.add(number)

    def _argument(self, value: Any) -> Any:
        """A tensor's place, or, if it has values, those."""
        if not isinstance(value, Tensor):
            return value
        if self.number(value) in self.pending:
            return self.place(value)
        return Constant.of(value)

    def _check_kept(self, name: str, tensors: list[Tensor]) -> None:
        """Raises PlanError for what gives a pending storage another size."""
        if name.startswith("resize") and any(
            self.number(each) in self.pending for each in tensors
        ):
            raise PlanError(
                f"deferred(): {name} is called on a tensor that isn't made yet; make a "
                "tensor of the new size instead"
            )


def memory_of(tensor: Tensor) -> Any:
    """A tensor's storage, unseen by Peeks."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def is_gone(reference: Any) -> bool:
    """Whether nothing holds a storage any longer."""
    return bool(reference.expired())


class Peeks(TorchFunctionMode):
    """Makes tensors whose memory is read without an operation."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in PEEKS:
            self.recording.share(args[0])
        return func(*args, **(kwargs or {}))


def _on_meta(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation has nothing to do with values.

    Raises PlanError for devices other than the CPU.
    """
    device = kwargs.get("device")
    devices = {each.device.type for each in tensors}
    devices |= set() if device is None else {torch.device(device).type}
    for each in sorted(devices - {"cpu", "meta"}):
        raise PlanError(
            f"deferred() builds models on the CPU, and {func} is for {each}; leave the "
            "device out"
        )
    return "meta" in devices


def _is_view(func: Any) -> bool:
    """Whether it shares its argument's memory and writes nothing."""
    schema = func._schema
    shares = any(each.alias_info is not None for each in schema.returns)
    return shares and not schema.is_mutable


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into."""
    if func is torch.ops.aten.native_batch_norm.default:  # whose schema doesn't say so
        return tensors_in(args[3:5])
    names = enumerate(func._schema.arguments)
    values = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in names
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in(values)


def _generator(func: Any, args: Any, kwargs: Any) -> torch.Generator | None:
    """What an operation draws random numbers from, if it does."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    return given[0] if given else torch.default_generator


def _results(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns, with tensors on the meta device for new ones; None if
    that depends on values."""
    if any("Tensor" not in str(each.type) for each in func._schema.returns):
        return None
    own: dict[int, Tensor] = {}  # arguments, by what stands for them on meta

    def on_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            like = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            own[id(like)] = value
            held.append(like)
            return like
        return None if isinstance(value, torch.Generator) else value

    held: list[Tensor] = []
    its, named = tree_map(on_meta, (args, kwargs))
    if "device" in named or any(a.name == "device" for a in func._schema.arguments):
        named["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            results = func(*its, **named)
    except (RuntimeError, NotImplementedError):
        return None
    for like in held:
        if like.shape != own[id(like)].shape:  # out=
            own[id(like)].resize_(like.shape)
    return tree_map(lambda each: own.get(id(each), each), results)


def _without_values(value: Any) -> Any:
    """A tensor on the CPU, its memory reserved and not touched."""
    if isinstance(value, Tensor) and value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return value
