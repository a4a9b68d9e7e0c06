"""Small models of tests.whole_batch, whose losses or layers see the whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxsched.models.three_encoder import ThreeEncoder, ThreeEncoderConfig

SMALL = ThreeEncoderConfig(
    vocabulary=64, text_length=8, audio_frames=8, width=16, heads=2, trunk_layers=2
)


class Retrieval(nn.Module):
    """Queries, each with a right and two wrong candidates, scored against all."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
        self.candidate = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, queries: Tensor, candidates: Tensor) -> dict[str, Tensor]:
        """queries [batch, 6], candidates [batch, 3, 5]."""
        scores = self.query(queries) @ self.candidate(candidates).flatten(0, 1).T
        right = 3 * torch.arange(len(queries))
        return {"loss": F.cross_entropy(scores, right), "scores": scores}


class Three(nn.Module):
    """Three encoders, and the losses of all pairs of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 16), nn.GELU(), nn.Linear(16, 8))
            for n in (4, 5, 6)
        )

    def forward(self, one: Tensor, two: Tensor, three: Tensor) -> Tensor:
        values = [
            F.normalize(encoder(x), dim=-1)
            for encoder, x in zip(self.encoders, (one, two, three), strict=True)
        ]
        own = torch.arange(len(one))
        pairs = ((0, 1), (0, 2), (1, 2))
        losses = [F.cross_entropy(values[a] @ values[b].T, own) for a, b in pairs]
        return torch.stack(losses).mean()


class Pairs(nn.Module):
    """FLAVA's logits of all pairs of a call. Its own head gathers those of all ranks,
    which have the same batch here."""

    def forward(
        self, image: Tensor, text: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = image @ text.T * scale.exp()
        return logits, logits.T, torch.arange(len(image))


class Normalised(nn.Module):
    """Convolutions and BatchNorm, which sees the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten()),
        )
        self.head = nn.Linear(64, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(images)), labels)


class Ranking(nn.Module):
    """The three encoders and the trunk of fxsched.models, and a loss over all pairs of
    samples: those that belong together come before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ThreeEncoder(SMALL)

    def forward(
        self, image: Tensor, text: Tensor, audio: Tensor, label: Tensor
    ) -> Tensor:
        logits = self.model(image, text, audio)
        before = (label[:, None] > label).to(logits.dtype)
        each = F.softplus(logits - logits[:, None])
        return (each * before).sum() / before.sum()
