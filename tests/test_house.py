"""The rooms of the house: imports point down, workers never see torch, the core needs torch and numpy only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BELOW_TRAINER = {"rollout", "models", "envs", "rewards", "algorithms", "experience", "utils"}
# Room -> rooms whose modules it may import, beside its own. `rlvla` itself holds nothing but the version.
MAY_IMPORT = {
    "cli": {"trainer", *BELOW_TRAINER},
    "trainer": BELOW_TRAINER,
    "rollout": BELOW_TRAINER - {"rollout"},
    "models": {"algorithms", "experience", "utils"},
    "envs": {"utils"},
    "rewards": {"utils"},
    "algorithms": set(),
    "experience": set(),
    "utils": set(),
    "": set(),
}


def imported_modules(source: str, package: str) -> list[str]:
    """Dotted names of all imports of a file, those inside functions too; imports for the type checker are left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from rlvla import envs` names a room only in its second half.
            found += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "require"):
            found += [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return found


def room_of(module: str) -> str | None:
    """The room a dotted name belongs to; None for other packages."""
    first, _, rest = module.partition(".")
    if first == "cli":
        return "cli"
    if first != "rlvla":
        return None
    room = rest.partition(".")[0]
    return room if room in MAY_IMPORT else ""


def misplaced(source: str, package: str, room: str) -> list[str]:
    """Imports that point up or sideways."""
    allowed = MAY_IMPORT[room] | {room, ""}
    rooms = {module: room_of(module) for module in imported_modules(source, package)}
    return [module for module, other in rooms.items() if other is not None and other not in allowed]


def python_files() -> list[Path]:
    return sorted([*(ROOT / "rlvla").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])


def test_every_room_is_known() -> None:
    rooms = {p.parent.relative_to(ROOT).parts[1:2] for p in python_files() if p.parts[len(ROOT.parts)] == "rlvla"}
    assert {r[0] for r in rooms if r} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    room = room_of(".".join(parts))
    assert room is not None
    assert misplaced(path.read_text(encoding="utf-8"), ".".join(parts[:-1]), room) == []


@pytest.mark.parametrize(
    ("source", "room", "package"),
    [
        ("from rlvla.trainer.config import BatchConfig", "rollout", "rlvla.rollout"),
        ("def f():\n    import rlvla.models.actor", "envs", "rlvla.envs"),
        ("from ..envs import base", "rewards", "rlvla.rewards"),
        ("from rlvla import envs", "models", "rlvla.models"),
        ("from rlvla.utils.arguments import arg", "algorithms", "rlvla.algorithms"),
        ("import importlib\nimportlib.import_module('rlvla.trainer')", "utils", "rlvla.utils"),
        ("import cli.eval_vla", "trainer", "rlvla.trainer"),
    ],
)
def test_the_check_sees_every_way_to_import(source: str, room: str, package: str) -> None:
    assert len(misplaced(source, package, room)) == 1


def test_imports_for_the_type_checker_do_not_count() -> None:
    source = "if TYPE_CHECKING:\n    from rlvla.trainer.config import BatchConfig"
    assert misplaced(source, "rlvla.envs", "envs") == []


def run_python(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


IMPORT_ALL = """
import importlib, pkgutil, sys
def import_all(name):
    package = importlib.import_module(name)
    for info in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(info.name)
"""


def test_environments_never_import_torch() -> None:
    run_python(
        IMPORT_ALL
        + """
import_all("rlvla.envs")
from rlvla.envs import make_env
make_env("toy_reach", 0).reset(0, 0)
heavy = {"torch", "transformers", "deepspeed", "tensorflow"} & set(sys.modules)
assert not heavy, heavy
"""
    )


def test_the_core_needs_torch_and_numpy_only() -> None:
    run_python(
        """
import sys
BLOCKED = {"transformers", "deepspeed", "peft", "robosuite", "mujoco", "tensorboard", "h5py", "matplotlib", "vllm",
           "openai", "safetensors", "tokenizers", "PIL", "tqdm"}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""
        + IMPORT_ALL
        + """
import rlvla
import_all("rlvla.algorithms")
import rlvla.experience, rlvla.models, rlvla.utils, rlvla.rewards, rlvla.rollout
from rlvla.algorithms.advantages import get_advantage_estimator
from rlvla.algorithms.policy_losses import get_policy_loss
get_advantage_estimator("gae"), get_policy_loss("ppo")
"""
    )
