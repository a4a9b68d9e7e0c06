"""Values over torch.distributed: as bytes and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxsched.graphs import Spec
from fxsched.transport import pack, packed_bytes, unpack

VALUES: dict[str, Tensor] = {
    "contiguous": torch.arange(12.0).view(3, 4),
    "0-d": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "expanded empty": torch.empty(0).expand(3, 0),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "slice": torch.arange(24.0).view(4, 6).chunk(3, 1)[1],
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 4),
    "one number, expanded": torch.tensor(2.0).expand(4, 8),
    "overlapping": torch.arange(8.0).unfold(0, 4, 2),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": torch.rand(3, 4, dtype=torch.cfloat).conj(),
    "bfloat16": torch.rand(3, 3).bfloat16(),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_tensor_arrives_as_it_was_alone_and_in_a_bundle(name: str) -> None:
    value = VALUES[name]
    for sent in (value, (value, torch.ones(3), value)):
        bundle = isinstance(sent, tuple)
        specs = tuple(map(Spec.of, sent if bundle else (sent,)))
        buffer = pack(sent)
        assert buffer.numel() == packed_bytes(specs)
        found = unpack(buffer, specs, bundle)
        for got, given in zip(
            found if bundle else (found,), sent if bundle else (sent,), strict=True
        ):
            assert torch.equal(got, given)
            if name not in ("overlapping", "empty", "expanded empty"):
                assert got.stride() == given.stride()
