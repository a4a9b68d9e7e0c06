"""README.md and docs/: blocks run and print what stands below them, links and anchors
lead somewhere, pictures are what their commands draw."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import fxsched
from fxsched.cli.main import group

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\{?\w+\}?)\n(.*?)^```$", re.M | re.S)
SHOWN = {"plan": 1, "stages": 1, "simulate": 1, "memory": 4}  # outputs below the blocks
PICTURE = re.compile(r"\[([^]]*)\]\(([^)]*(?:svg|pictures/[^)]*))\)")


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    found = BLOCK.findall(page.read_text())
    return [(language, text) for language, text in found if language in languages]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def with_python(own_test: str = '"{}"') -> list[Path]:
    """Pages with Python that no other test runs: those name their page."""
    me = Path(__file__)
    others = [p.read_text() for p in (ROOT / "tests").rglob("test_*.py") if p != me]
    return [
        page
        for page in PAGES
        if blocks(page, "python")
        and not any(own_test.format(page.name) in text for text in others)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", with_python(), ids=lambda page: page.stem)
def test_blocks_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # blocks write files
    monkeypatch.setenv("COLUMNS", "100")  # as where no terminal is
    names: dict[str, object] = {}
    printed = ""
    compared = 0
    for language, text in blocks(page, "python", "text"):
        if language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, str(page), "exec"), names)
            printed = output.getvalue()
        elif printed:
            assert _lines(printed) == _lines(text)
            printed = ""
            compared += 1
    assert compared == SHOWN.get(page.stem, compared)
    logging.getLogger("fxsched").setLevel(logging.NOTSET)  # a page changes it


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


WORDS = ("job", "stage", "microbatch", "shard", "worker", "bubble")
OWN = {"glossary", "index", "refusals", "README"}  # lists, and what has little room


@pytest.mark.parametrize("word", WORDS)
def test_pages_link_to_the_glossary_where_they_first_use_a_word(word: str) -> None:
    use = re.compile(rf"(?<![\w-]){word}(?:e?s)?(?![\w-])", re.I)
    aside = re.compile(r"^#.*$|`[^`]*`|<[^>]*>", re.M)
    for page in PAGES:
        text = aside.sub("", prose(page))
        alone = re.sub(r"\[[^]]*\]\((?!glossary)[^)]*\)", "", text)  # no other links
        if page.stem not in OWN and (first := use.search(alone)):
            linked = re.search(rf"\[[^]]*{use.pattern}[^]]*\]\(glossary", alone, re.I)
            assert linked, f"{page.name} uses {word!r} without a link"
            assert linked.start() <= first.start(), f"{page.name}: {word!r} is first"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(there), f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_block_has_a_language_and_an_end(page: Path) -> None:
    fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
    assert all(fences[::2]) and not any(fences[1::2]) and len(fences) % 2 == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shell_blocks_parse_and_their_commands_exist(page: Path) -> None:
    for _, text in blocks(page, "sh", "bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["fxsched"] and not words[1].startswith("-"):
                assert words[1] in group.commands, line
                options = {o for p in group.commands[words[1]].params for o in p.opts}
                named = {word.partition("=")[0] for word in words if word[:2] == "--"}
                assert named <= options, line
            elif words[:2] == ["python", "-m"] and words[2].startswith("tests"):
                module = ROOT / words[2].replace(".", "/")
                assert module.is_dir() or module.with_suffix(".py").is_file(), line


def test_pictures_are_what_the_commands_beside_them_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn: set[str] = set()
    for page in PAGES:
        commands = [c for _, text in blocks(page, "sh") for c in text.splitlines()]
        for alternative, picture in PICTURE.findall(prose(page)):
            path = (page.parent / picture).relative_to(ROOT)
            assert len(alternative) > 20, f"{page.name}: say what {picture} shows"
            made_by = [c for c in commands if c.endswith(f" {path}")]
            assert len(made_by) == 1, f"{page.name} needs the command of {picture}"
            if made_by[0] not in drawn:
                drawn.add(made_by[0])
                path.parent.mkdir(parents=True, exist_ok=True)
                done = CliRunner().invoke(group, shlex.split(made_by[0])[1:])
                assert done.exit_code == 0, done.output
            assert path.read_bytes() == (ROOT / path).read_bytes()
    assert drawn


def test_every_option_and_every_public_name_has_a_line() -> None:
    options = (ROOT / "docs" / "options.md").read_text()
    for name in list(inspect.signature(fxsched.backend).parameters)[1:]:
        assert f"`{name}`" in options, f"docs/options.md doesn't name {name}"
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in fxsched.__all__:
        assert f":: fxsched.{name}\n" in reference, f"docs/api.md doesn't name {name}"
