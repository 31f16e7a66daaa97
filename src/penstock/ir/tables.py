"""Tables for display: as text in terminals, as HTML in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Protocol

from penstock.core.records import dataclass

MOST_ROWS = 60


@dataclass(frozen=True, slots=True)
class DisplayTable:
    """A caption, the titles of columns, and rows; numbers are right-aligned. The first sixty of
    ``rows`` are shown."""

    caption: str
    titles: tuple[str, ...]
    rows: Sequence[tuple[str | int, ...]]

    @property
    def _more(self) -> str:
        rest = len(self.rows) - MOST_ROWS
        return f"and {rest} more" if rest > 0 else ""

    def text(self) -> str:
        """Return columns under their titles, as wide as their widest cells."""
        shown = [self.titles, *self.rows[:MOST_ROWS]]
        widths = [max(len(str(row[i])) for row in shown) for i in range(len(self.titles))]
        lines = [self.caption]
        for row in shown if self.rows else ():
            cells = [
                str(cell).rjust(width) if isinstance(cell, int) else str(cell).ljust(width)
                for cell, width in zip(row, widths, strict=True)
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, self._more] if self._more else lines)

    def html(self) -> str:
        """Return an HTML ``table`` element."""
        head = "".join(f'<th style="text-align:left">{escape(title)}</th>' for title in self.titles)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows[:MOST_ROWS])
        caption = f'<caption style="text-align:left">{escape(self.caption)}</caption>'
        table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"{table}<p>{self._more}</p>" if self._more else table


def html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An element ``table`` of texts, for pages with a style of their own."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(cell: str | int) -> str:
    side = "right" if isinstance(cell, int) else "left"
    return f'<td style="text-align:{side}">{escape(str(cell))}</td>'


class Tabular(Protocol):
    """An object shown as a table: terminals and notebooks call ``_repr_pretty_`` and
    ``_repr_html_``, which classes take from here."""

    def _as_table(self) -> DisplayTable: ...


def show_html(shown: Tabular) -> str:
    """The method ``_repr_html_`` of a class with ``_as_table``."""
    return shown._as_table().html()


def show_text(shown: Tabular, printer: Any, cycle: bool) -> None:
    """The method ``_repr_pretty_`` of a class with ``_as_table``, for IPython's printer."""
    printer.text(shown._as_table().text())
