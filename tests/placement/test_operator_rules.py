"""The rules for rows, held against what operators compute and against the rules of
torch.distributed.tensor.

A rule claims what an operator does to the rows of a batch. Each claim is tried on two
parts of random numbers and on the whole that they make up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxsched.ir.graphs import tensors
from fxsched.placement.kinds import Kind, Rows
from fxsched.placement.rule_table import RULES
from fxsched.placement.tracker import Tracker, Watch

Cut = Mapping[int, int]  # the dimension of the rows, by the position of a tensor
DRAWS = "rand drop bernoulli multinomial normal poisson uniform exponential geometric"
UNFIT = (
    *(*DRAWS.split(), "cauchy", "multi_head_attention", "empty", "new_", "_like"),
    "jiterator",
    "batch_norm",  # its kernel reads beyond weights of too few channels
)
SIZED = (  # divide by a size, or compare with one, out of sight of the rules
    *("nn.functional.cross_entropy", "nn.functional.multilabel_soft_margin_loss"),
    *("nn.functional.kl_div", "nn.functional.conv_transpose"),
    "nn.functional.scaled_dot_product_attention",
)
OPERATORS = [
    each
    for each in op_db
    if each.dtypes and not any(word in each.name for word in (*UNFIT, *SIZED))
]
GROUPS = 8


class Claim(NamedTuple):
    """What a rule says of one result, and that result of the parts and of the whole."""

    rows: Rows
    first: Tensor
    second: Tensor
    whole: Tensor

    @property
    def is_made(self) -> bool:
        rows = self.rows
        known = rows.kind not in (Kind.OTHER, Kind.UNKNOWN) and rows.cause is None
        return known and not rows.numbers and self.first.numel() > 0

    @property
    def fits(self) -> bool:
        """Whether the whole has the shape that it would have. If not, a number that the
        operator was given is the size of a part; symbolic sizes tell of those."""
        shape = list(self.first.shape)
        if self.rows.kind is Kind.SHARD:
            shape[self.rows.dim] *= 2
        return list(self.whole.shape) == shape

    @property
    def holds(self) -> bool:
        first, second, whole = self.first, self.second, self.whole
        if self.rows.kind is Kind.REPLICATE:
            return close(first, whole) and close(second, whole)
        if self.rows.kind is Kind.SUM:
            return close(first + second, whole)
        if self.rows.kind is Kind.MEAN:
            return close((first + second) / 2, whole)
        blocks = whole.unflatten(self.rows.dim, (self.rows.outer, 2, -1))
        parts = (
            each.flatten(self.rows.dim, self.rows.dim + 1)
            for each in blocks.unbind(self.rows.dim + 1)
        )
        return all(map(close, (first, second), parts))


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, 1e-6, 1e-8, equal_nan=True)


def claims(call: Callable[..., Any], given: Sequence[Any], cut: Cut) -> list[Claim]:
    """What the table says of the results of a call with these, some cut into parts.

    given: one part's; the other part has the same numbers in another order.
    """
    parts = {i: (given[i], given[i].flip(0).roll(1, -1)) for i in cut}
    results = []
    for part in range(2):
        values = [parts[i][part] if i in cut else v for i, v in enumerate(given)]
        values = [v.clone() if isinstance(v, Tensor) else v for v in values]
        tracker = Tracker(*(given[i].shape[d] for i, d in [*cut.items()][:1]), {})
        for i, dim in cut.items():
            tracker.put(values[i], Rows(Kind.SHARD, dim))
        with Watch(tracker):
            out = list(tensors(call(*values)))
        results.append(out)
        rows = list(map(tracker.of, out))
    whole = [
        torch.cat(parts[i], cut[i]) if i in cut else v for i, v in enumerate(given)
    ]
    together = tensors(call(*whole))
    return [Claim(*each) for each in zip(rows, *results, together, strict=True)]


def cuts(given: Sequence[Any]) -> Iterator[Cut]:
    """One tensor along each dimension, and all that are as long there."""
    for i, tensor in enumerate(given):
        for dim in range(tensor.dim()) if isinstance(tensor, Tensor) else ():
            if tensor.shape[dim] < 2 or not tensor.numel():
                continue
            yield {i: dim}
            alike = {
                j: dim
                for j, other in enumerate(given)
                if isinstance(other, Tensor)
                and other.dim() > dim
                and other.shape[dim] == tensor.shape[dim]
            }
            if len(alike) > 1:
                yield alike


def samples(info: Any) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    """Calls of an operator, each with its arguments in a list."""
    kinds = [t for t in (torch.float64, torch.int64) if t in info.dtypes]
    kind = next(iter(kinds or info.dtypes))
    for sample in list(info.sample_inputs("cpu", kind))[:2]:
        flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

        def call(*values: Any, spec: Any = spec) -> Any:
            given, args, kwargs = tree_unflatten(list(values), spec)
            return info.op(given, *args, **kwargs)

        yield call, flat


def tried(info: Any) -> Iterator[tuple[Cut, Claim]]:
    """The claims that are made of an operator's samples."""
    for call, given in samples(info):
        for cut in list(cuts(given))[:3]:
            try:
                found = claims(call, given, cut)
            except (
                RuntimeError,
                IndexError,
                ValueError,
                TypeError,
                NotImplementedError,
            ):
                continue  # the sample fits no batch of twice the size
            yield from ((cut, claim) for claim in found if claim.is_made and claim.fits)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_what_a_rule_claims_holds_for_parts_and_the_whole(group: int) -> None:
    torch.manual_seed(0)
    wrong, made = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in OPERATORS[group::GROUPS]:
            for cut, claim in tried(info):
                made += 1
                if not claim.holds:
                    wrong.append(f"{info.name}, rows at {dict(cut)}: {claim.rows}")
    assert not wrong, "\n".join(wrong)
    assert made > 60


def test_a_wrong_claim_is_found() -> None:
    x = torch.randn(4, 3)
    (claim,) = claims(torch.relu, [x], {0: 0})
    assert claim.is_made and claim.fits and claim.holds
    for wrong in (Rows(Kind.SHARD, 1), Rows(Kind.SUM), Rows(Kind.MEAN)):
        assert not (
            claim._replace(rows=wrong).fits and claim._replace(rows=wrong).holds
        )
    whole = claim.whole.flip(0)
    assert not claim._replace(whole=whole).holds


@pytest.mark.parametrize("dim", range(5))
def test_nearest_volumes_keep_rows_and_channels_apart(dim: int) -> None:
    """op_db has only lines in its first samples of it."""
    (claim,) = claims(lambda x: F.interpolate(x, scale_factor=2), [VOLUMES], {0: dim})
    assert claim.is_made == (dim < 2)
    assert not claim.is_made or (claim.fits and claim.holds)


@pytest.mark.parametrize("rows", range(3))
@pytest.mark.parametrize("last", [9, -2, 0])
def test_a_pad_mixes_only_the_dimensions_that_it_changes(last: int, rows: int) -> None:
    """torch.fft.rfft(x, n=..) names all dimensions, those that it keeps with 0."""
    (claim,) = claims(lambda x: F.pad(x, (0, last, 0, 0, 0, 0)), [X], {0: rows})
    assert claim.is_made == (rows < 2 or last == 0)
    assert not claim.is_made or (claim.fits and claim.holds)


X, Y, Z = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)
M, N = torch.randn(4, 8), torch.randn(8, 6)
NUMBERS = torch.randint(0, 8, (4, 6))
VOLUMES = torch.randn(4, 2, 3, 3, 3)
Peer = tuple[Callable[..., Any], tuple[Tensor, ...], Cut]
PEERS: dict[str, Peer] = {
    "add": (torch.add, (X, Y), {0: 0, 1: 0}),
    "add, broadcast": (torch.add, (X, M[0]), {0: 0}),
    "mul of features": (torch.mul, (X, Y), {0: 2, 1: 2}),
    "gelu": (F.gelu, (X,), {0: 1}),
    "sum": (torch.sum, (X,), {0: 0}),
    "sum of features": (lambda x: x.sum(2), (X,), {0: 0}),
    "sum over rows": (lambda x: x.sum(0), (X,), {0: 0}),
    "sum, kept": (lambda x: x.sum(1, keepdim=True), (X,), {0: 2}),
    "mean of features": (lambda x: x.mean(-1), (X,), {0: 0}),
    "amax of features": (lambda x: x.amax(-1), (X,), {0: 0}),
    "argmax of features": (lambda x: x.argmax(-1), (X,), {0: 0}),
    "softmax": (lambda x: x.softmax(-1), (X,), {0: 0}),
    "log_softmax": (lambda x: x.log_softmax(1), (X,), {0: 2}),
    "cumsum": (lambda x: x.cumsum(1), (X,), {0: 0}),
    "topk": (lambda x: x.topk(2, -1), (X,), {0: 0}),
    "sort": (lambda x: x.sort(-1), (X,), {0: 0}),
    "mm, rows": (torch.mm, (M, N), {0: 0}),
    "mm, columns": (torch.mm, (M, N), {1: 1}),
    "mm, over rows": (torch.mm, (M, N), {0: 1, 1: 0}),
    "bmm": (torch.bmm, (X, Z), {0: 0, 1: 0}),
    "bmm, rows of one": (torch.bmm, (X, Z), {0: 1}),
    "transpose": (lambda x: x.transpose(0, 2), (X,), {0: 0}),
    "permute": (lambda x: x.permute(2, 0, 1), (X,), {0: 1}),
    "flatten": (lambda x: x.flatten(1), (X,), {0: 0}),
    "flatten of rows": (lambda x: x.flatten(0, 1), (X,), {0: 0}),
    "unflatten": (lambda x: x.view(-1, 6, 2, 4), (X,), {0: 0}),
    "unsqueeze": (lambda x: x.unsqueeze(0), (X,), {0: 0}),
    "expand": (lambda x: x[:, None].expand(-1, 3, 6, 8), (X,), {0: 0}),
    "select": (lambda x: x[:, 1], (X,), {0: 0}),
    "slice": (lambda x: x[:, 1:3], (X,), {0: 0}),
    "cat": (lambda x, y: torch.cat([x, y], 1), (X, Y), {0: 0, 1: 0}),
    "stack": (lambda x, y: torch.stack([x, y]), (X, Y), {0: 0, 1: 0}),
    "split": (lambda x: x.split(4, 2), (X,), {0: 0}),
    "embedding": (F.embedding, (NUMBERS, N), {0: 0}),
    "layer_norm": (lambda x, w: F.layer_norm(x, (8,), w), (X, M[0]), {0: 0}),
    "where": (lambda x, y: torch.where(x > 0, x, y), (X, Y), {0: 0, 1: 0}),
    "view_as_complex": (torch.view_as_complex, (X.unflatten(2, (4, 2)),), {0: 1}),
    "view_as_real": (torch.view_as_real, (X + 1j,), {0: 2}),
    "dropout, none": (lambda x: F.dropout(x, 0.0), (X,), {0: 0}),
    "nearest of volumes": (lambda x: F.interpolate(x, (2, 3, 4)), (VOLUMES,), {0: 0}),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group()


def placement(rows: Rows) -> Any:
    """In the words of torch.distributed.tensor."""
    if rows.kind is Kind.SHARD:
        return Shard(rows.dim)
    return {Kind.REPLICATE: Replicate(), Kind.SUM: Partial()}.get(rows.kind)


@pytest.mark.parametrize("name", PEERS)
def test_rules_are_those_of_dtensor(name: str, mesh: DeviceMesh) -> None:
    """Where it needs no communication, as where rows don't meet."""
    call, given, cut = PEERS[name]
    placed = [
        DTensor.from_local(x, mesh, [Shard(cut[i]) if i in cut else Replicate()])
        for i, x in enumerate(given)
    ]
    with CommDebugMode() as communication, torch.no_grad():
        theirs = [each.placements[0] for each in tensors(call(*placed))]
    assert communication.get_total_counts() == 0
    with torch.no_grad():
        ours = [placement(each.rows) for each in claims(call, given, cut)]
    assert ours == theirs


def test_no_rule_is_of_what_pytorch_opens_before_the_rules_see_it() -> None:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    opened = set()
    for name in RULES:
        packet: Any = getattr(torch.ops.aten, name, None)
        overloads = [getattr(packet, o) for o in (packet.overloads() if packet else ())]
        known = [o for o in overloads if torch._C._dispatch_has_kernel(o.name())]
        if known and all(each.has_kernel_for_dispatch_key(key) for each in known):
            opened.add(name)
    assert opened <= {"_fused_rms_norm"}  # which has a kernel of its own on GPUs
