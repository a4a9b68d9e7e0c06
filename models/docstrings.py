"""Real data for two_tower: the functions of Python's standard library, each with the
docstring that its author wrote for it. pages.py and sources.py make more of them."""

import ast
import gc
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # parseHTMLPage -> parse HTML Page
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PAD, UNKNOWN = 0, 1
CODE_LENGTH, DOC_LENGTH = 64, 24  # words


T = TypeVar("T")


class Parts(NamedTuple, Generic[T]):
    """What is learnt from, and what only shows what was learnt."""

    train: T
    held_out: T


class Function(NamedTuple):
    """A function of the standard library, and what its docstring says."""

    source: str  # blank where the docstring was
    doc: str
    code_words: list[str]  # as split() makes them
    doc_words: list[str]


@dataclass(frozen=True)
class Data:
    """Row i of a doc tensor is the docstring of row i of its code tensor."""

    train_code: Tensor  # [n, code_length] int64
    train_doc: Tensor  # [n, doc_length] int64
    held_out_code: Tensor
    held_out_doc: Tensor
    words: list[str]  # words[id] is the word of a token id


def load(
    code_length: int = CODE_LENGTH,
    doc_length: int = DOC_LENGTH,
    vocabulary: int = 4096,
) -> Data:
    """Read the library; a tenth of the functions, chosen by hash, is held out."""
    train, held_out = library(code_length, doc_length)
    words = vocabulary_of(train, vocabulary)
    return Data(
        numbered((each.code_words for each in train), words, code_length),
        numbered((each.doc_words for each in train), words, doc_length),
        numbered((each.code_words for each in held_out), words, code_length),
        numbered((each.doc_words for each in held_out), words, doc_length),
        words,
    )


@cache
def library(code_length: int, doc_length: int) -> Parts[list[Function]]:
    """The functions with at least 5 words of code and 3 of docstring, each once."""
    parts: Parts[list[Function]] = Parts([], [])
    seen: set[str] = set()
    gc.disable()  # syntax trees are many objects without a cycle: it halves the time
    try:
        found = list(functions(Path(sysconfig.get_paths()["stdlib"])))
    finally:
        gc.enable()
    for code, doc in found:
        code_words, doc_words = split(code)[:code_length], split(doc)[:doc_length]
        text = " ".join(doc_words)
        texts = {" ".join(code_words), text}
        if len(code_words) < 5 or len(doc_words) < 3 or seen & texts:
            continue
        seen |= texts  # each once: never in both parts, no negative that is true
        part = parts.held_out if zlib.crc32(text.encode()) % 10 == 0 else parts.train
        part.append(Function(code, doc, code_words, doc_words))
    return parts


def vocabulary_of(functions: Iterable[Function], size: int) -> list[str]:
    """Padding, the unknown word, then the size - 2 most frequent words."""
    counts = Counter(w for f in functions for w in (*f.code_words, *f.doc_words))
    common = sorted(counts, key=lambda word: (-counts[word], word))
    return ["<pad>", "<unknown>", *common[: size - 2]]


def numbered(rows: Iterable[list[str]], words: list[str], length: int) -> Tensor:
    """Rows of words -> their ids, padded, [n, length] int64."""
    ids = {word: i for i, word in enumerate(words)}
    numbers = ([ids.get(word, UNKNOWN) for word in row] for row in rows)
    return torch.tensor([row + [PAD] * (length - len(row)) for row in numbers])


def functions(root: Path) -> Iterator[tuple[str, str]]:
    """(source without docstrings, docstring), in file order."""
    for path in sorted(root.rglob("*.py")):
        if SKIP.intersection(path.relative_to(root).parts):
            continue
        source = path.read_text("utf-8", "replace")
        documented = [
            (node, text)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, (ast.ClassDef, *FUNCTION))
            and (text := ast.get_docstring(node, clean=False))
        ]
        lines = source.split("\n")  # not splitlines: ast counts no form feeds
        for node, _ in documented:
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            lines[first - 1 : last] = [""] * (last - first + 1)
        for node, text in documented:
            if isinstance(node, FUNCTION):
                yield "\n".join(lines[node.lineno - 1 : node.end_lineno]), text


def split(text: str) -> list[str]:
    """self.parse_HTML(someText) -> parse html some text: each word once, in order."""
    words = (word.lower() for word in WORD.findall(text))
    return [word for word in dict.fromkeys(words) if len(word) > 1 and word != "self"]


def others(n: int, rows: Tensor, generator: torch.Generator) -> Tensor:
    """For each row, another row of the n."""
    return (rows + torch.randint(1, n, rows.shape, generator=generator)) % n


def batch(
    code: Tensor, doc: Tensor, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw size pairs; every second has another's docstring, and label 0.0."""
    rows = torch.randint(len(code), (size,), generator=generator)
    label = torch.arange(1, size + 1) % 2
    doc_rows = torch.where(label == 1, rows, others(len(doc), rows, generator))
    return code[rows], doc[doc_rows], label.float()


def pairs(code: Tensor, doc: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every function twice: with its own docstring, then with another one's."""
    n = len(code)
    other = others(n, torch.arange(n), torch.Generator().manual_seed(seed))
    label = torch.cat([torch.ones(n), torch.zeros(n)])
    return torch.cat([code, code]), torch.cat([doc, doc[other]]), label
