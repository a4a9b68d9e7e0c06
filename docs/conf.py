"""The site: `python -m sphinx -W -b html docs docs/_build`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

sys.path.insert(0, str(Path(__file__).parents[1]))

import fxsched

project = "fxsched"
version = release = fxsched.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fxsched {version}"
myst_heading_anchors = 3  # as GitHub makes them
autodoc_typehints = "none"
autodoc_member_order = "bysource"
toc_object_entries = False
smartquotes = False
html_show_copyright = False

OPTION = re.compile(r"([a-z_*][\w, *]{0,40}): ")


def setup(app: Any) -> None:
    """Docstrings are plain text, with `code` and lists of arguments; pages that links
    lead to are shown below them."""
    app.connect("autodoc-process-docstring", write_rst)
    app.connect("doctree-resolved", show_pages)


def show_pages(app: Any, tree: nodes.document, name: str) -> None:
    """Shows the pages of steps that a page links to in frames below the links."""
    for link in tree.findall(addnodes.download_reference):
        if not link["reftarget"].endswith(".html"):
            continue
        paragraph = link
        while not isinstance(paragraph, nodes.paragraph):
            paragraph = paragraph.parent
        frame = (
            f'<iframe src="_downloads/{link["filename"]}" title="{link.astext()}" '
            'style="width: 100%; height: 26rem; border: 0"></iframe>'
        )
        raw = nodes.raw("", frame, format="html")
        paragraph.parent.insert(paragraph.parent.index(paragraph) + 1, raw)


def write_rst(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Rewrites a docstring in place: arguments as a list, what is indented as it is."""
    text: list[str] = []
    state = "blank"  # or "item" (an argument), "literal", "text"
    for line in lines:
        indented, option = line.startswith("    "), OPTION.match(line)
        if not line.strip():
            text.append("")
            state = "literal" if state == "literal" else "blank"
        elif option and state in ("blank", "item"):
            text += ["", f"- **{escape(option[1])}**: {escape(line[option.end() :])}"]
            state = "item"
        elif indented and state == "item":
            text.append("  " + escape(line.strip()))
        elif indented and state != "text":
            text += [line] if state == "literal" else ["", "::", "", line]
            state = "literal"
        else:
            text += [escape(line.strip())] if state == "text" else ["", escape(line)]
            state = "text"
    lines[:] = text


def escape(line: str) -> str:
    """Text in reStructuredText, `code` in two backticks."""
    parts = line.split("`")
    if len(parts) % 2 == 0:  # code that goes on in the next line
        return re.sub(r"([\\*_|`])", r"\\\1", line)
    plain = [re.sub(r"([\\*_|])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(a + b for a, b in zip(plain, [*code, ""], strict=True))
