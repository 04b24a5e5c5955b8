"""Names that are known before what they stand for is imported."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

from rlvla.algorithms import advantages, policy_losses
from rlvla.options import Registry

ROOMS = [
    (advantages, advantages.list_advantage_estimators, advantages.get_advantage_estimator),
    (policy_losses, policy_losses.list_policy_losses, policy_losses.get_policy_loss),
]


@pytest.mark.parametrize(("room", "names", "get"), ROOMS, ids=["advantages", "policy_losses"])
def test_every_shipped_name_is_listed_and_leads_to_its_function(room: ModuleType, names, get) -> None:
    code = (
        "import importlib, sys\n"
        f"from {room.__name__} import {names.__name__} as names\n"
        "before = names()\n"
        "assert 'torch' not in sys.modules\n"
        f"for module in {[info.name for info in pkgutil.iter_modules(room.__path__)]}:\n"
        f"    importlib.import_module(f'{room.__name__}.{{module}}')\n"
        "assert names() == before, set(names()) ^ set(before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in names():
        assert callable(get(name))


def test_a_shipped_name_is_taken_before_its_module_is_imported(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shipped_things.py").write_text(
        "from tests_of_names import table\n@table.register('thing')\ndef thing(*, width): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "tests_of_names", sys.modules[__name__])
    assert table.names() == ["thing"] and "shipped_things" not in sys.modules
    with pytest.raises(ValueError, match="'thing' already belongs to shipped_things.thing"):
        table.register("thing")(lambda: None)
    assert table.parameters("thing") == {"width"}
    with pytest.raises(ValueError, match="unknown thing 'other'; known: thing"):
        table.get("other")


table: Registry = Registry("thing", modules={"shipped_things": ("thing",)})
