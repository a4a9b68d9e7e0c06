"""Pictures as notebooks show them: HTML that needs no network and no script."""

from __future__ import annotations

from html import escape


def figure(picture: str, label: str, title: str, text: str) -> str:
    """An SVG picture that scrolls where it is wide, with a text to unfold below it.

    label: what the picture is of, for those who don't see it; the text says what is in
    it, and `title` what the text is.
    """
    return (
        f'<figure style="margin:0" aria-label="{escape(label)}">\n'
        f'<div style="overflow-x:auto" tabindex="0" role="group" '
        f'aria-label="picture, scrollable">{picture}</div>\n'
        f"<details><summary>{escape(title)}</summary>\n"
        f'<pre style="line-height:1.2">{escape(text)}</pre></details>\n'
        "</figure>"
    )
