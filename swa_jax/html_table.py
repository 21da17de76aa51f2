"""A small HTML table for notebooks, without a style sheet or script of its own."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

# Colours of Okabe and Ito, which colour-blind readers can tell apart; each part also has a pattern
# of its own. What is free shows the page behind it, light or dark.
_STRIPES = "repeating-linear-gradient(45deg, {0} 0 3px, transparent 3px 6px)"
_FILLS = {
    "held": "#0072B2",
    "pending": _STRIPES.format("#E69F00"),
    "free": "transparent",
    "elsewhere": "repeating-linear-gradient(90deg, #999999 0 1px, transparent 1px 4px)",
}


@dataclass(frozen=True)
class Bar:
    """A cell that shows how a whole is divided: counts by the names of `_FILLS`."""

    parts: tuple[tuple[str, int], ...]


Cell = str | Bar


def html_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], notes: Sequence[str] = ()
) -> str:
    """A title, a table and lines below it. Texts are escaped here.

    Args:
      title: one line.
      header: a name for each column.
      rows: a cell for each column.
      notes: a line each.
    """
    head = "".join(f'<th style="text-align:left">{html.escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    lines = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    return (
        f"<div><b>{html.escape(title)}</b>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{lines}</div>"
    )


def _cell(cell: Cell) -> str:
    if isinstance(cell, Bar):
        return f'<td style="min-width:12em">{_bar(cell)}</td>'
    return f'<td style="text-align:left">{html.escape(cell)}</td>'


def _bar(bar: Bar) -> str:
    whole = max(sum(count for _, count in bar.parts), 1)
    parts = "".join(
        f'<span title="{count:,} {name}" style="display:inline-block;height:100%;'
        f'width:{100 * count / whole:.2f}%;background:{_FILLS[name]}"></span>'
        for name, count in bar.parts
        if count
    )
    style = "display:flex;height:1em;border:1px solid #888888"
    return f'<div style="{style}">{parts}</div>'
