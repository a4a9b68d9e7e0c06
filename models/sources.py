"""Real data for encoder_decoder, gpt and experts: the words of each function with the
first sentence of its docstring, and plain source text, byte by byte."""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from .docstrings import (
    CODE_LENGTH,
    DOC_LENGTH,
    PAD,
    WORD,
    Function,
    Parts,
    library,
    numbered,
    vocabulary_of,
)

SENTENCE = 12  # words
END = re.compile(r"[.:;]\s|\n\s*\n")  # of a sentence


class Sentences(NamedTuple):
    """Row i of each is of function i; one vocabulary serves both."""

    code: Tensor  # [n, CODE_LENGTH] int64, 0 is padding
    sentence: Tensor  # [n, SENTENCE] int64, 0 is the end and what follows


def load_sentences(vocabulary: int = 4096) -> Parts[Sentences]:
    """The library's functions, parted as docstrings.load() parts them."""
    train, held_out = library(CODE_LENGTH, DOC_LENGTH)
    words = vocabulary_of(train, vocabulary)
    return Parts(sentences(train, words), sentences(held_out, words))


def load_text() -> Parts[Tensor]:
    """The same functions one after the other, without blank lines: [bytes] uint8."""
    train, held_out = library(CODE_LENGTH, DOC_LENGTH)
    return Parts(text(train), text(held_out))


def batch(
    sentences: Sentences, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw size functions: source, target_in and target_out for encoder_decoder.

    target_in is target_out one place later; padding stands at its start.
    """
    rows = torch.randint(len(sentences.code), (size,), generator=generator)
    target_out = sentences.sentence[rows]
    start = torch.full((size, 1), PAD)
    return sentences.code[rows], torch.cat([start, target_out[:, :-1]], 1), target_out


def windows(
    text: Tensor, size: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw size pieces of the text: tokens and targets, the byte after each of them."""
    start = torch.randint(len(text) - length, (size, 1), generator=generator)
    piece = text[start + torch.arange(length + 1)].long()
    return piece[:, :-1], piece[:, 1:]


def sentences(functions: list[Function], words: list[str]) -> Sentences:
    """Each function and the first sentence of its docstring, as numbers of words."""
    first = (first_sentence(each.doc)[:SENTENCE] for each in functions)
    code = numbered((each.code_words for each in functions), words, CODE_LENGTH)
    return Sentences(code, numbered(first, words, SENTENCE))


def first_sentence(doc: str) -> list[str]:
    """Its words, as often as they come, in lower case."""
    return [word.lower() for word in WORD.findall(END.split(doc.strip(), 1)[0])]


def text(functions: list[Function]) -> Tensor:
    """The bytes of all functions, without blank lines: [n] uint8."""
    lines = (line for each in functions for line in each.source.split("\n"))
    plain = "".join(line + "\n" for line in lines if line.strip())
    return torch.frombuffer(bytearray(plain.encode()), dtype=torch.uint8)
