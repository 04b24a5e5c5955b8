"""What the site of the documentation has besides docs/: the pages of the repository's root, and the API reference.

A hook of MkDocs (mkdocs.yml). The reference has a page for each package, from the docstrings of its modules, which are
read and not imported.
"""

from __future__ import annotations

import ast
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "rlvla"
# Page of the repository -> page of the site; those of docs/ keep their names.
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Tables without a header have an empty one in Markdown.
STYLE = ".md-typeset thead:not(:has(th:not(:empty))) { display: none; }\n"
# Code, which is left alone, or a link or picture with a relative target; a picture may be a link (a badge).
_CODE_OR_LINK = re.compile(
    r"^[ ]*```.*?^[ ]*```$|`[^`\n]+`"
    r"|(?P<picture>!?)\[(?P<label>!\[[^\]]*\]\([^)]*\)|[^\[\]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)


def on_config(config: Any) -> Any:
    """Complete the navigation by pages that it does not list and by the reference, and add a style."""
    config.extra_css.append("assets/site.css")
    config.nav = whole_nav(config.nav)
    return config


def whole_nav(nav: list[Any]) -> list[Any]:
    """The navigation with all pages of docs/, those that it does not list under a title of their own."""
    listed = set(pages_of(nav))
    more = sorted({path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - listed)
    reference = {"Reference": ["reference/index.md", *_nav_of(PACKAGE)]}
    return [*nav, *([{"Further pages": more}] if more else []), reference]


def pages_of(entry: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages_of(part)]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, target in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=in_site(text, source)))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    for package in packages():
        files.append(File.generated(config, f"reference/{package}.md", content=package_page(package)))
    files.append(File.generated(config, "reference/index.md", content=names_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links from docs/ to pages of the repository's root lead to their place in the site."""
    if page.file.src_uri in ROOT_PAGES.values() or page.file.src_uri.startswith("reference/"):
        return markdown
    return in_site(markdown, f"docs/{page.file.src_uri}")


# ----------------------------------------------------------------------------------------------------------- links
def in_site(text: str, source: str) -> str:
    """A page of the repository with links as they are in the site; a link to anything but a page becomes plain text."""
    here = posixpath.dirname(_place_of(source) or "") or "."

    def replaced(found: re.Match[str]) -> str:
        if found["target"] is None:
            return found[0]
        place = _place_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"])))
        if place is None:
            return found["label"]
        return f"{found['picture']}[{found['label']}]({posixpath.relpath(place, here)}{found['anchor'] or ''})"

    return _CODE_OR_LINK.sub(replaced, text)


def _place_of(path: str) -> str | None:
    """The place in the site of a file of the repository; None if it has none."""
    return ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


# ------------------------------------------------------------------------------------------------------- reference
@cache
def packages() -> tuple[str, ...]:
    """Dotted names of the packages in `rlvla`."""
    folders = sorted(path.parent.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("__init__.py"))
    return tuple(".".join(folder.parts) for folder in folders if len(folder.parts) > 1)


def _nav_of(package: str) -> list[Any]:
    """The pages of the packages directly inside of one, each with those below it."""
    inside = [name for name in packages() if name.rpartition(".")[0] == package]
    entries: list[Any] = []
    for name in inside:
        page, below = f"reference/{name}.md", _nav_of(name)
        entries.append({name.rpartition(".")[2]: [page, *below]} if below else {name.rpartition(".")[2]: page})
    return entries


def package_page(package: str) -> str:
    """The page of a package: its docstring, and its modules with all that is public in them."""
    folder = ROOT / Path(*package.split("."))
    parts = [f"# {package}", ast.get_docstring(_tree(folder / "__init__.py")) or ""]
    for path in sorted(folder.glob("*.py")):
        module = f"{package}.{path.stem}"
        if path.stem != "__init__" and not path.stem.startswith("_"):
            parts.append(f"::: {module}")
    return "\n\n".join(parts) + "\n"


def names_page() -> str:
    """The names that `rlvla` itself offers, with the first line of what is said of them."""
    lines = ["# Reference", "", f"`from {PACKAGE} import ...` offers:", "", "| | |", "|---|---|"]
    homes = next(
        node.value
        for node in _tree(ROOT / PACKAGE / "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
    names = [
        (name, f"{PACKAGE}.{home}") for home, found in ast.literal_eval(_without_stars(homes)).items() for name in found
    ]
    for name, module in sorted(names, key=lambda entry: entry[0].lower()):
        home, doc = _definition(module, name)
        lines.append(f"| [`{name}`][{home}.{name}] | {doc.splitlines()[0].replace('|', chr(92) + '|')} |")
    rooms = "The packages, by [room](../contributing.md#the-rooms), have pages of their own."
    return "\n".join([*lines, "", rooms, "", f"::: {PACKAGE}.experience", ""])


def _without_stars(node: ast.expr) -> ast.expr:
    """A literal with the entries of `*(...)` in its place."""

    class Flat(ast.NodeTransformer):
        def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
            entries = [e for part in node.elts for e in (part.value.elts if isinstance(part, ast.Starred) else [part])]
            return ast.Tuple(entries, node.ctx)

    return Flat().visit(node)


def _definition(module: str, name: str) -> tuple[str, str]:
    """The module in which a name is defined, and its docstring."""
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, ast.get_docstring(node) or ""
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _definition(node.module, name)
    raise LookupError(f"{module} does not define {name}")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
