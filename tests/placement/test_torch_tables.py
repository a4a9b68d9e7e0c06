"""Some of PyTorch's operators and modules as models; `python -m tests.torch_tables`
runs them all."""

from __future__ import annotations

import pytest

from ..torch_tables import models, verdict

MODELS = models()
OPERATORS = (
    *("addmm", "amax", "argmax", "bmm", "cat", "cdist", "cumsum", "einsum", "fft.fft"),
    *("gather", "index_add", "index_put", "linalg.norm", "logsumexp", "masked_fill"),
    *("linalg.cholesky", "linalg.inv", "linalg.lu_factor", "linalg.solve"),
    *("nn.functional.conv3d", "nn.functional.cross_entropy", "nn.functional.dropout"),
    *("nn.functional.embedding", "nn.functional.gelu", "roll", "scatter_add"),
    *("randint_like", "sort", "topk", "var"),
)
MODULES = ("BatchNorm1d", "Bilinear", "CrossEntropyLoss", "InstanceNorm1d", "Linear")
OTHERS = ("MSELoss", "MultiheadAttention", "Softmax")
NAMES = [f"op {name}" for name in OPERATORS] + [
    f"module nn.{n}" for n in (*MODULES, *OTHERS)
]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_equal_to_eager(name: str) -> None:
    row = verdict(name, MODELS[name]())
    assert row.kind == "equal", row
