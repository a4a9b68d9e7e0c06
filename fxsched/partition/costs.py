"""What operations cost: FLOPs and bytes, and the seconds that they should take.

An operation takes the longer of computing its FLOPs and moving the bytes that it reads
and writes (the roofline of Williams et al. 2009, doi 10.1145/1498765.1498785), and the
time to start it. FLOPs are those of torch.utils.flop_counter's formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..clock.network import Link
from ..ir import ops
from ..ir.graphs import draws, is_mutable, is_view, tensors
from ..ir.meta import of_node
from ..ir.request import Device

aten = torch.ops.aten
OTHER = "other"  # the row of accelerators that have none


class Rates(NamedTuple):
    """What a worker does in a second. Plans need ratios, so rough numbers will do.

    FLOPs are those of products of matrices.
    """

    half: float  # FLOPs in bfloat16 and float16
    single: float  # in float32, and in types that have no field
    double: float  # in float64
    tf32: float  # in float32, where torch may round to TF32
    memory: float  # bytes read or written
    link: float  # bytes sent to another worker
    latency: float = 2e-5  # seconds from a send to its receive, without the bytes
    launch: float = 5e-6  # seconds to start an operation
    disk: float = 1.5e9  # bytes written to a file, or read: of an NVMe disk
    host: float = 2.5e10  # bytes from a device to the host, or back: PCIe 4 x16

    def flops(self, dtype: torch.dtype, func: object = None) -> float:
        """FLOPs in a second of an operation on a type."""
        if dtype in (torch.bfloat16, torch.float16):
            return self.half
        if dtype is not torch.float32:
            return self.double if dtype is torch.float64 else self.single
        convolves = "convolution" in str(func)
        flags = CONVOLUTIONS if convolves else MATRICES
        return self.tf32 if flags.fp32_precision == "tf32" else self.single


MATRICES: Any = torch.backends.cuda.matmul
CONVOLUTIONS: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
RATES = {  # the names are those of ir.request.Device, and OTHER
    # a core, gloo on the same machine; half types differ from CPU to CPU
    "cpu": Rates(8e10, 8e10, 4e10, 8e10, 1.5e10, 2e9),
    # a GPU of 2022, its own machine's bus
    OTHER: Rates(2e14, 2e13, 1e13, 1e14, 2e12, 2e10),
    # NVIDIA's data sheets, without sparsity; float64 of the first two is 1/64 of
    # float32 (white papers of GA102 and Ada); PCIe 4 x16 one way
    "A10": Rates(125e12, 31.2e12, 0.49e12, 62.5e12, 0.6e12, 32e9),
    "L4": Rates(121e12, 30.3e12, 0.47e12, 60e12, 0.3e12, 32e9),
    # NVIDIA's data sheets of the SXM modules (A100: of 80 GB); NVLink one way
    "A100": Rates(312e12, 19.5e12, 19.5e12, 156e12, 2.04e12, 300e9),
    "H100": Rates(989e12, 67e12, 67e12, 494e12, 3.35e12, 450e9),
    "H200": Rates(989e12, 67e12, 67e12, 494e12, 4.8e12, 450e9),
}


def rates_of(device: torch.device, target: Device | None) -> Rates:
    """What a device does in a second; target: see Request.device."""
    return RATES[target or _row(device)]


@cache
def _row(device: torch.device) -> str:
    """The row of RATES for a device of this machine."""
    if device.type == "cpu":
        return "cpu"
    module: Any = getattr(torch, device.type, None)
    if not (hasattr(module, "get_device_name") and module.is_available()):
        return OTHER
    words = re.split(r"\W+", module.get_device_name(device))
    return next((word for word in words if word in RATES), OTHER)


def send_seconds(
    size: int, device: torch.device, link: Link | None, target: Device | None
) -> float:
    """Seconds to send so many bytes to another worker; link: see Request.link."""
    if link is not None:
        return link.alone(size)
    rates = rates_of(device, target)
    return rates.latency + size / rates.link


def copied(value: Tensor, target: Device | None) -> Work:
    """What a copy of a value costs, and that of its gradient."""
    rates = rates_of(value.device, target)
    seconds = rates.launch + 2 * value.nbytes / rates.memory
    return Work(0, seconds, seconds * value.requires_grad, 0)


def update_seconds(size: int, device: torch.device, target: Device | None) -> float:
    """Seconds for a step of AdamW on weights of so many bytes: it reads them, their
    gradients and two moments, and writes all but the gradients."""
    rates = rates_of(device, target)
    return rates.launch + 7 * size / rates.memory


class Cost(NamedTuple):
    """FLOPs, bytes read and written, and estimated seconds."""

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """The sum of two costs."""
        flops, moved, seconds = other
        return Cost(self.flops + flops, self.bytes + moved, self.seconds + seconds)


class Work(NamedTuple):
    """What a node of the traced graph costs for one microbatch.

    forward, backward: seconds, estimated or measured; backward counts the gradients
        that its inputs want, and is 0 where none does.
    held: bytes that autograd keeps for it from F to B, but for the model's state and
        inputs, and what an earlier node keeps already.
    """

    flops: int
    forward: float
    backward: float
    held: int


# They read as much of their first argument as they give.
GATHERS = (aten.embedding, aten.index_select, aten.gather, aten.index, aten.slice)
# The same formulas as on a GPU, by the operation's name there.
ALSO = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        aten._scaled_dot_product_flash_attention
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


def _recurrent(times: int, input: Tensor, *args: Any, out_val: Any) -> int:
    """FLOPs of a recurrent layer: its input [time, batch, features] times the matrices
    of its weights, which are the next arguments."""
    steps, batch, _ = input.shape
    matrices = (weight for weight in tensors(args[:2]) if weight.dim() == 2)
    return times * 2 * steps * batch * sum(weight.numel() for weight in matrices)


FORMULAS: dict[Any, Callable[..., int]] = {  # that flop_registry lacks
    aten.mkldnn_rnn_layer: partial(_recurrent, 1),
    aten.mkldnn_rnn_layer_backward: partial(_recurrent, 2),
    aten._cudnn_rnn: partial(_recurrent, 1),
    aten._cudnn_rnn_backward: partial(_recurrent, 2),
}

# oneDNN's layer is taken apart into time steps (autodiff/autograd.py): for each, how
# often it moves the bytes of the hidden weights, and operations that it starts. B adds
# up their gradient (two reads and a write), after a product that reads and one that
# writes.
STEPS = {
    aten.mkldnn_rnn_layer: (1, 12),
    aten.mkldnn_rnn_layer_backward: (5, 24),
}


def cost_of(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    out: Any,
    target: Device | None = None,
) -> Cost:
    """The cost of one operation on (fake) tensors; a view costs nothing."""
    if is_view(func) and not is_mutable(func):
        return Cost()
    packet = getattr(func, "overloadpacket", func)
    formula = FORMULAS.get(packet) or flop_registry.get(ALSO.get(packet, packet))
    flops = int(formula(*args, **kwargs, out_val=out)) if formula else 0
    outputs = list(tensors(out))
    inputs = [*tensors(args), *tensors(tuple(kwargs.values()))]
    read = outputs if packet in GATHERS else inputs
    moved = sum(t.nbytes for t in [*outputs, *read])
    if not outputs:
        return Cost(flops, moved)
    rates = rates_of(outputs[0].device, target)
    speed = rates.flops((inputs or outputs)[0].dtype, packet)
    launches = 1
    if packet in STEPS:
        times, launches = (len(inputs[0]) * each for each in STEPS[packet])
        moved += times * inputs[2].nbytes
    seconds = max(flops / speed, moved / rates.memory) + launches * rates.launch
    return Cost(flops, moved, seconds)


def cost_of_nodes(nodes: Iterable[fx.Node], target: Device | None) -> Cost:
    """The cost of nodes of an aten graph, which carry fake values."""
    total = Cost()
    for node in nodes:
        func: Any = node.target
        args: Any = fx.map_arg(node.args, _value)
        kwargs: Any = fx.map_arg(node.kwargs, _value)
        if func is ops.seeded:
            func, args = args[0], args[2:]
        if node.op == "call_function" and hasattr(func, "_schema"):
            out = of_node(node).get("val")
            total = total.plus(cost_of(func, args, kwargs, out, target))
    return total


def _value(node: fx.Node) -> Any:
    return of_node(node).get("val")


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the cost of the operations that run under it.

    random: how many of them drew random numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, target: Device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target = target
        self.total = Cost()
        self.random = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        cost = cost_of(func, args, kwargs or {}, out, self.target)
        self.total = self.total.plus(cost)
        self.random += draws(func, args, kwargs or {})
        return out


class Operands:
    """The arguments of an operation, without a history of their own, of which the
    operation's F makes one.

    written: whether the operation writes into them, so that they are copies.
    leaves: those that want a gradient.
    """

    def __init__(self, args: Any, kwargs: Mapping[str, Any], written: bool) -> None:
        self.written, self.leaves = written, list[Tensor]()
        self.args = self._without_history(args)
        self.kwargs = {k: self._without_history(v) for k, v in kwargs.items()}

    def _without_history(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._without_history, value))
        if not isinstance(value, Tensor):
            return value
        plain = value.detach()
        if value.requires_grad:
            self.leaves.append(plain.requires_grad_())
        return plain.clone() if self.written else plain

    def backward(self, result: Any) -> Callable[[], Sequence[Tensor | None]]:
        """From what F made of the operands to what computes the gradients of leaves."""
        # without gradients a model may call what has none, as nn.TransformerEncoder-
        # Layer does in eval mode
        outs = [
            t
            for t in tensors(result)
            if t.grad_fn is not None and type(t.grad_fn).__name__ != "NotImplemented"
        ]
        if not outs or not self.leaves:
            return tuple
        tangents = [torch.ones_like(t) for t in outs]

        def backward() -> Sequence[Tensor | None]:
            with torch.autograd.set_multithreading_enabled(False):
                leaves = self.leaves
                return torch.autograd.grad(outs, leaves, tangents, allow_unused=True)

        return backward
