"""The documentation as a site: every page is in its navigation, every link of the built folder leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import rlvla
from tests.support.documentation import ROOT


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The hook of MkDocs, which needs no MkDocs to be imported."""
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "examples/scripts/docs_pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of the tools."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_every_page_is_in_the_navigation_once(pages: ModuleType) -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    docs = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    packages = [f"reference/{name}.md" for name in pages.packages()]
    expected = sorted([*docs, *pages.ROOT_PAGES.values(), "reference/index.md", *packages])
    assert sorted(pages.pages_of(pages.whole_nav(nav))) == expected
    assert {"Further pages": ["data.md"]} in pages.whole_nav([page for page in docs if page != "data.md"])


def test_links_of_the_repository_are_links_of_the_site(pages: ModuleType) -> None:
    text = (
        "[a](docs/first_hour.md) [b](docs/algorithms/gae.md#how) [`c`](CONTRIBUTING.md) [license](LICENSE) "
        "![p](docs/images/toy_push.png) [![q](https://x.y/q.svg)](docs/data.md) [![q](https://x.y/q.svg)](LICENSE) "
        "[d](https://x.y/docs/a.md) [e](#here) `[f](docs/data.md)`\n"
        "```\n[g](docs/data.md)\n```\n"
    )
    assert pages.in_site(text, "README.md") == (
        "[a](first_hour.md) [b](algorithms/gae.md#how) [`c`](contributing.md) license "
        "![p](images/toy_push.png) [![q](https://x.y/q.svg)](data.md) ![q](https://x.y/q.svg) "
        "[d](https://x.y/docs/a.md) [e](#here) `[f](docs/data.md)`\n"
        "```\n[g](docs/data.md)\n```\n"
    )
    inside = (
        "[a](../data.md) [b](index.md) [c](../../CHANGELOG.md) [d](../../cli/eval_vla.py) ![p](../images/toy_push.png)"
    )
    assert pages.in_site(inside, "docs/algorithms/gae.md") == (
        "[a](../data.md) [b](index.md) [c](../changelog.md) d ![p](../images/toy_push.png)"
    )


def test_the_reference_names_what_the_package_offers(pages: ModuleType) -> None:
    found = dict(re.findall(r"^\| \[`(\w+)`\]\[([\w.]+)\.\1\] \| \S.+ \|$", pages.names_page(), re.MULTILINE))
    assert {*found, "__version__"} == set(rlvla.__all__)
    for name, module in found.items():
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), f"{module} does not define {name}"
    assert "::: rlvla.envs.workers.pool\n" in pages.package_page("rlvla.envs.workers")
    assert {"rlvla.algorithms.flow", "rlvla.utils"} <= set(pages.packages())


class Links(HTMLParser):
    """Targets of the links and pictures of a page, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.targets += [value for name in ("href", "src") if (value := found.get(name))]
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}


@pytest.mark.nightly
def test_the_site_is_built_and_has_no_dead_links(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]  # as docs.sh does
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr  # --strict: a warning is an error
    read = {path: Links() for path in (tmp_path / "site").rglob("*.html") if path.name != "404.html"}
    for path, links in read.items():
        links.feed(path.read_text(encoding="utf-8"))
    dead = []
    for path, links in read.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not place.exists() or (anchor and place in read and anchor not in read[place].anchors):
                dead.append(f"{path.relative_to(tmp_path)}: {target}")
    assert not dead, dead[:20]
    assert 'href="reference/index.html"' in (tmp_path / "site/index.html").read_text(encoding="utf-8")
    engine = (tmp_path / "site/reference/rlvla.rollout.html").read_text(encoding="utf-8")
    assert 'id="rlvla.rollout.engine.RolloutEngine.run"' in engine and "Play all episodes and return" in engine
