"""Tables as Markdown and as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from mola.compare.report.tables import Cell, Column, Row, Table

__all__ = ["as_latex", "as_markdown", "escape_latex", "latex_document"]

ARROWS = {"low": "\N{DOWNWARDS ARROW}", "high": "\N{UPWARDS ARROW}"}

LONG, BROAD = 40, 80
"""Rows from which a table may break over pages; characters in a row from which it is shrunk to the line."""

SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{DOWNWARDS ARROW}": r"$\downarrow$",
    "\N{UPWARDS ARROW}": r"$\uparrow$",
    "\N{RIGHTWARDS ARROW}": r"$\rightarrow$",
    "\N{DEGREE SIGN}": r"$^\circ$",
    "\N{GREEK SMALL LETTER LAMDA}": r"$\lambda$",
    "\N{MIDDLE DOT}": r"$\cdot$",
    "\N{EN DASH}": "--",
    "\N{LEFT DOUBLE QUOTATION MARK}": "``",
    "\N{RIGHT DOUBLE QUOTATION MARK}": "''",
}


def escape_latex(text: str) -> str:
    """The text with everything that LaTeX reads as a command made harmless."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def as_markdown(table: Table) -> str:
    """Title, table and caption; groups of columns are named in each of their columns, one that all share in the corner."""
    shared = {(column.group, column.better) for column in table.columns}
    corner = ""
    if len(shared) == 1 and table.columns[0].group:
        corner = _with_arrow(replace(table.columns[0], name=table.columns[0].group))
        names = [column.name for column in table.columns]
    else:
        names = [" ".join(part for part in (column.group, _with_arrow(column)) if part) for column in table.columns]
    lines = [_line([corner, *names]), _line(["---", *["---:"] * len(names)])]
    for row in table.rows:
        name = f"*{_pipes(row.name)}*" if row.aside else _pipes(row.name)
        lines.append(
            _line([name, *[f"**{_pipes(cell.text)}**" if cell.best else _pipes(cell.text) for cell in row.cells]])
        )
    return "\n".join([f"### {table.title}", "", *lines, "", table.caption, ""])


def _pipes(text: str) -> str:
    return text.replace("|", "\\|")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _with_arrow(column: Column) -> str:
    return f"{column.name} {ARROWS[column.better]}" if column.better else column.name


def as_latex(table: Table) -> str:
    """A booktabs table with its caption: one float, or a table that breaks over pages if it is long."""
    layout = "l" + "r" * len(table.columns)
    head = _head(table.columns)
    body = []
    for position, row in enumerate(table.rows):
        if row.aside and position and not table.rows[position - 1].aside:
            body.append(r"\midrule")
        body.append(_row(row))
    caption = rf"\caption{{{escape_latex(table.title)}. {escape_latex(table.caption)}}}"
    if len(table.rows) > LONG:
        heading = [r"\toprule", *head, r"\midrule"]
        lines = [r"{\footnotesize", rf"\begin{{longtable}}{{{layout}}}", caption + r" \\", *heading, r"\endfirsthead"]
        lines += [*heading, r"\endhead", *body, r"\bottomrule", r"\end{longtable}", "}", ""]
        return "\n".join(lines)
    inner = [
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        *head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    if _breadth(table) > BROAD:
        inner = [r"\resizebox{\linewidth}{!}{%", *inner, "}"]
    return "\n".join([r"\begin{table}[htbp]", r"\centering", caption, r"\footnotesize", *inner, r"\end{table}", ""])


def _head(columns: Sequence[Column]) -> list[str]:
    names = " & ".join(["", *[escape_latex(_with_arrow(column)) for column in columns]]) + r" \\"
    if not any(column.group for column in columns):
        return [names]
    groups, rules, place = [], [], 2
    for name, members in groupby(column.group for column in columns):
        size = len(list(members))
        groups.append(rf"\multicolumn{{{size}}}{{c}}{{{escape_latex(name)}}}")
        if name:
            rules.append(rf"\cmidrule(lr){{{place}-{place + size - 1}}}")
        place += size
    return [" & ".join(["", *groups]) + r" \\", " ".join(rules), names]


def _row(row: Row) -> str:
    name = rf"\textit{{{escape_latex(row.name)}}}" if row.aside else escape_latex(row.name)
    return " & ".join([name, *[_cell(cell) for cell in row.cells]]) + r" \\"


def _cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    if text.startswith("-") and text[1:2].isdigit():
        text = f"$-${text[1:]}"  # a minus, not a hyphen
    return rf"\textbf{{{text}}}" if cell.best else text


def _breadth(table: Table) -> int:
    widths = [len(column.name) for column in table.columns]
    for row in table.rows:
        widths = [max(width, len(cell.text)) for width, cell in zip(widths, row.cells, strict=True)]
    return sum(widths) + 2 * len(widths) + max((len(row.name) for row in table.rows), default=0)


def latex_document(sections: Sequence[tuple[str, Sequence[Table]]]) -> str:
    """A document that compiles as it is; tables can be taken from it one by one.

    Args:
        sections: title and tables of each.

    Returns:
        LaTeX.
    """
    lines = [
        r"% Needs booktabs, longtable and graphicx, which every LaTeX has.",
        r"\documentclass{article}",
        r"\usepackage[T1]{fontenc}",
        r"\usepackage[utf8]{inputenc}",
        r"\usepackage[margin=2cm]{geometry}",
        r"\usepackage{booktabs,graphicx,longtable}",
        r"\begin{document}",
        "",
    ]
    for title, tables in sections:
        lines += [rf"\section*{{{escape_latex(title)}}}", ""]
        # Each on its own page at the latest: LaTeX keeps only so many floats waiting.
        lines += [part for table in tables for part in (as_latex(table), r"\clearpage", "")]
    return "\n".join([*lines, r"\end{document}", ""])
