"""The names of the package itself: lazy, complete, and the same for type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlvla


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import rlvla, sys; dir(rlvla); print(sorted({'torch', 'numpy', 'yaml', 'rlvla.envs'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_type_checkers_see_the_names_that_there_are() -> None:
    tree = ast.parse(Path(rlvla.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names:
            assert alias.asname == alias.name, "only `import X as X` is exported to type checkers"
            seen[alias.name] = node.module.removeprefix("rlvla.")
    assert seen == rlvla._HOME_OF
    assert set(rlvla.__all__) == {*seen, "__version__"} and set(rlvla.__all__) <= set(dir(rlvla))


@pytest.mark.parametrize("name", rlvla.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rlvla, name) is not None
    if name != "__version__":
        home = sys.modules[f"rlvla.{rlvla._HOME_OF[name]}"]
        assert getattr(rlvla, name) is getattr(home, name)
        assert getattr(home, name).__doc__, "the reference describes it"


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute Aktor"):
        _ = rlvla.Aktor
    with pytest.raises(ImportError):
        exec("from rlvla import Aktor", {})


def test_a_package_that_is_missing_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(missing: str) -> None:
        def import_module(name: str) -> None:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

        monkeypatch.delitem(vars(rlvla), "Actor", raising=False)
        monkeypatch.setattr(rlvla.importlib, "import_module", import_module)

    without("transformers.models")
    with pytest.raises(rlvla.MissingExtraError) as raised:
        _ = rlvla.Actor
    expected = "rlvla.Actor needs transformers, which is not installed. Install it with: pip install rlvla"
    assert str(raised.value) == expected
    without("rlvla.models.actor")  # a broken installation of our own
    with pytest.raises(ModuleNotFoundError, match="No module named 'rlvla"):
        _ = rlvla.Actor
