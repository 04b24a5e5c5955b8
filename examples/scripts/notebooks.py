"""Write the notebooks in examples/notebooks and the listings in docs/library.md from the scripts in examples/library.

Launch: python examples/scripts/notebooks.py
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "library"
NOTEBOOKS = ROOT / "examples" / "notebooks"
PAGE = ROOT / "docs" / "library.md"
_CELL = re.compile(r"^# %% ?(.*)\n", re.MULTILINE)
_LISTING = re.compile(r"(^```python\n# examples/library/(\w+\.py)\n).*?(?=^```)", re.MULTILINE | re.DOTALL)
# Paths are those of the repository; Jupyter starts in the folder of the notebook.
_TO_ROOT = """\
import os
from pathlib import Path

here = Path.cwd()
os.chdir(next(place for place in (here, *here.parents) if (place / "setup.py").exists()))"""


def cells_of(script: str) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of a script: its docstring, and for each `# %% words` the words and what follows."""
    title = ast.get_docstring(ast.parse(script)) or ""
    cells = [("markdown", f"# {title}")]
    _, *parts = _CELL.split(script)
    for words, code in zip(parts[::2], parts[1::2]):
        cells += [("markdown", words)] if words else []
        cells += [("code", code.strip("\n"))]
    return cells


def notebook(script: str) -> str:
    """The notebook of a script, as JSON."""
    first, *cells = cells_of(script)
    content = {
        "cells": [_cell(*cell) for cell in (first, ("code", _TO_ROOT), *cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str) -> dict[str, object]:
    cell: dict[str, object] = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def listed(page: str) -> str:
    """A page with the listings that name a script (`# examples/library/...` in their first line) as the scripts are."""
    return _LISTING.sub(lambda found: found[1] + (SCRIPTS / found[2]).read_text(encoding="utf-8"), page)


def outputs() -> dict[Path, str]:
    """What this command writes: file -> content."""
    scripts = sorted(SCRIPTS.glob("*.py"))
    notebooks = {NOTEBOOKS / f"{path.stem}.ipynb": notebook(path.read_text(encoding="utf-8")) for path in scripts}
    return {**notebooks, PAGE: listed(PAGE.read_text(encoding="utf-8"))}


def main() -> None:
    """Write all of them."""
    NOTEBOOKS.mkdir(exist_ok=True)
    for path, content in outputs().items():
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
