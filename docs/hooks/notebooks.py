"""MkDocs hook that turns the notebooks of the gallery into pages: their text, their code and their stored outputs.

The page of `gallery/NAME.ipynb` is `gallery/NAME.md`. Links to a notebook lead to its page, and the page offers the notebook
for download. Cells that Jupyter collapses are collapsed on the page.
"""

from __future__ import annotations

import base64
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOK_LINK = re.compile(r"(\]\([^)\s:]*)\.ipynb\)")


def as_markdown(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook and its figures by file name."""
    parts = []
    figures = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        code = f"```python\n{source}\n```"
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            code = '??? note "Code"\n' + textwrap.indent(code, "    ")
        parts.append(code)
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
                continue
            figure = f"{name}-{len(figures) + 1}.png"
            figures[figure] = base64.b64decode(output["data"]["image/png"])
            parts.append(f"![{''.join(output['data']['text/plain'])}]({figure})")
    title, *rest = parts[0].split("\n", 1)
    download = f'<a href="{name}.ipynb" download>Download this notebook</a>'
    return "\n\n".join([title, download, *rest, *parts[1:]]) + "\n", figures


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and its figures."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path = Path(file.src_uri)
        page, figures = as_markdown(json.loads(file.content_string), path.stem)
        files.append(File.generated(config, path.with_suffix(".md").as_posix(), content=page))
        for name, figure in figures.items():
            files.append(File.generated(config, path.with_name(name).as_posix(), content=figure))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to notebooks lead to their pages."""
    return NOTEBOOK_LINK.sub(r"\1.md)", markdown)
