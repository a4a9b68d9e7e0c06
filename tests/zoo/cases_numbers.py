"""Casts, complex numbers and linear algebra."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import BATCH, Inputs, Zoo
from .net import WIDTH, Net, pair

NUMBERS = Zoo("features")


@NUMBERS(autocast=True)
def autocast() -> tuple[nn.Module, Inputs]:
    return Net(), pair()


@NUMBERS(autocast=True)
def autocast_attention() -> tuple[nn.Module, Inputs]:
    class Attention(Net):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.attention(x, x, x)[0].float())

    return Attention(), pair(4, WIDTH)


@NUMBERS()
def autocast_inside() -> tuple[nn.Module, Inputs]:
    class Inside(Net):
        def hidden(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                x = self.one(x)
            return self.two(x)

    return Inside(), pair()


@NUMBERS()
def complex_numbers() -> tuple[nn.Module, Inputs]:
    class Fourier(Net):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

        def hidden(self, x: Tensor) -> Tensor:
            waves = torch.fft.rfft(self.one(x)) * self.filter
            return self.two(torch.fft.irfft(waves, n=WIDTH))

    return Fourier(), pair()


@NUMBERS()
def complex_linear() -> tuple[nn.Module, Inputs]:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat) for _ in range(4))
            self.net = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.complex(x, x.flip(1))).abs().mean()

    return Complex(), pair()[:1]


@NUMBERS()
def spectrogram() -> tuple[nn.Module, Inputs]:
    class Spectrum(Net):
        def forward(self, sound: Tensor, y: Tensor) -> Tensor:
            window = torch.hann_window(30, device=sound.device)
            waves = torch.stft(sound, 30, 16, window=window, return_complex=True)
            return (self.hidden(waves.abs().transpose(1, 2)) - y).pow(2).mean()

    sound = torch.randn(BATCH, 64)
    return Spectrum(), (sound, torch.randn(BATCH, 5, WIDTH))


@NUMBERS()
def linear_algebra() -> tuple[nn.Module, Inputs]:
    class Solve(Net):
        def hidden(self, x: Tensor) -> Tensor:
            square = self.one(x).reshape(-1, 4, 4)
            eye = torch.eye(4) * 5
            return self.two(torch.linalg.solve(square + eye, square).flatten(1))

    return Solve(), pair()


@NUMBERS()
def scan_with_cumsum() -> tuple[nn.Module, Inputs]:
    class Scan(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).cumsum(-1).logcumsumexp(-1))

    return Scan(), pair()


@NUMBERS()
def einsum() -> tuple[nn.Module, Inputs]:
    class Einsum(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(WIDTH, 3, WIDTH))

        def hidden(self, x: Tensor) -> Tensor:
            x = self.one(x)
            return self.two(
                torch.einsum("bi,ihj,bj->bh", x, self.mix, x).repeat(1, 6)[:, :16]
            )

    return Einsum(), pair()
