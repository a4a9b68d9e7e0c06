"""Real data for three_encoder and unet: each function of Python's standard library as a
picture of its page, the words of its docstring, and the sound of its bytes."""

import string
from typing import NamedTuple

import torch
from torch import Tensor

from .docstrings import (
    CODE_LENGTH,
    DOC_LENGTH,
    Function,
    Parts,
    library,
    numbered,
    others,
    vocabulary_of,
)

HEIGHT, WIDTH = 32, 64  # lines and columns of a picture
FRAMES, WINDOW, HOP = 32, 64, 32  # of a sound, the last two in bytes
GREY = (  # of each kind of character; a blank is 0
    (string.ascii_letters + "_", 0.4),
    (string.digits, 0.6),
    ("\"'#", 0.8),
    ("()[]{}<>=+-*/%&|^~!@.,:;?\\`$", 1.0),
)


class Pages(NamedTuple):
    """Row i of each is made of function i."""

    image: Tensor  # [n, 1, HEIGHT, WIDTH], 0.0 to 1.0
    text: Tensor  # [n, DOC_LENGTH] int64, 0 is padding
    audio: Tensor  # [n, FRAMES, WINDOW // 2 + 1]


def load(vocabulary: int = 4096) -> Parts[Pages]:
    """The library's functions, parted as docstrings.load() parts them."""
    train, held_out = library(CODE_LENGTH, DOC_LENGTH)
    words = vocabulary_of(train, vocabulary)
    return Parts(pages(train, words), pages(held_out, words))


def batch(
    pages: Pages, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw size functions: image, text, audio and label, as three_encoder takes them.

    In every second one of the three, drawn at random, is another's, and label is 0.0.
    """
    n = len(pages.text)
    rows = torch.randint(n, (size,), generator=generator)
    label = torch.arange(1, size + 1) % 2
    other = others(n, rows, generator)
    odd = torch.randint(3, (size,), generator=generator)
    image, text, audio = (
        each[torch.where((label == 0) & (odd == i), other, rows)]
        for i, each in enumerate(pages)
    )
    return image, text, audio, label.float()


def noisy(
    pages: Pages, size: int, generator: torch.Generator, noise: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Draw size pictures: with Gaussian noise added and without, as unet takes them."""
    clean = pages.image[torch.randint(len(pages.image), (size,), generator=generator)]
    return clean + noise * torch.randn(clean.shape, generator=generator), clean


def pages(functions: list[Function], words: list[str]) -> Pages:
    """A picture, a text and a sound of each function."""
    sources = [each.source for each in functions]
    text = numbered((each.doc_words for each in functions), words, DOC_LENGTH)
    return Pages(pictures(sources), text, sounds(sources))


def pictures(sources: list[str]) -> Tensor:
    """The top left of each page, a pixel a character, grey by its kind."""
    grey = torch.zeros(256)
    for characters, shade in GREY:
        grey[list(characters.encode())] = shade
    sheets = [sheet(source.split("\n")) for source in sources]
    return grey[in_rows(sheets).long()].view(-1, 1, HEIGHT, WIDTH)


def sheet(lines: list[str]) -> bytes:
    """HEIGHT rows of WIDTH characters: the top left of a page."""
    blank = [""] * (HEIGHT - len(lines))
    return b"".join(first_bytes(line, WIDTH) for line in [*lines[:HEIGHT], *blank])


def sounds(sources: list[str]) -> Tensor:
    """The first bytes taken for a wave: how loud each pitch is in each frame."""
    length = (FRAMES - 1) * HOP + WINDOW
    wave = in_rows([first_bytes(source, length) for source in sources]) / 128
    frames = wave.unfold(1, WINDOW, HOP) * torch.hann_window(WINDOW)
    loud: Tensor = torch.fft.rfft(frames).abs().log1p()
    return loud


def first_bytes(text: str, length: int) -> bytes:
    """So many of a text, which are ASCII, with zeros behind it."""
    return text[:length].encode("ascii", "replace").ljust(length, b"\0")


def in_rows(rows: list[bytes]) -> Tensor:
    """n rows of one length -> [n, length] uint8."""
    flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return flat.view(len(rows), -1)
