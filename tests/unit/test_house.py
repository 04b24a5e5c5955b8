"""The rooms: imports point down and in no circle, workers never see torch, the core needs torch and numpy only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# From the ground up. A room may import the rooms of lower floors, and itself; `rlvla` itself holds the version, and the
# names of all rooms for those outside.
FLOORS = (
    {"options"},
    {"algorithms", "experience"},
    {"utils"},
    {"models", "envs"},
    {"data", "rewards", "memory", "replay"},
    {"rollout", "checkpoints", "serving", "teleoperation"},
    {"evaluation"},
    {"trainer"},
    {"commands"},
    {"recipes"},
    {"cli"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Stricter than their floor.
ONLY = {"envs": {"utils", "options"}, "rewards": {"utils", "options"}, "utils": {"options"}, "algorithms": {"options"}}


def imported_modules(source: str, package: str) -> list[str]:
    """Dotted names of all imports of a file, those inside functions and for the type checker too."""
    found = []
    for node in ast.walk(ast.parse(source)):
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


def for_the_type_checker(source: str, package: str) -> set[str]:
    """What is imported below `if TYPE_CHECKING:`; it costs nothing at run time."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            found |= {name for part in node.body for name in imported_modules(ast.unparse(part), package)}
    return found


def room_of(module: str) -> str | None:
    """The room a dotted name belongs to; None for other packages."""
    first, _, rest = module.partition(".")
    if first == "cli":
        return "cli"
    if first != "rlvla":
        return None
    room = rest.partition(".")[0]
    return room if room in FLOOR else ""


def misplaced(source: str, package: str, room: str) -> list[str]:
    """Imports that point up or sideways. What a room may see at run time may be stricter than its floor (`ONLY`)."""
    lower = {other for other, floor in FLOOR.items() if floor < FLOOR[room or "cli"]}
    at_run_time = lower & ONLY.get(room, lower) if room else set()
    type_only, wrong = for_the_type_checker(source, package), []
    for module in imported_modules(source, package):
        other = room_of(module)
        allowed = lower if module in type_only else at_run_time
        if other is not None and other not in allowed | {room, ""}:
            wrong.append(module)
    return wrong


def python_files() -> list[Path]:
    return sorted([*(ROOT / "rlvla").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def module_imports() -> dict[str, set[str]]:
    """Module -> the modules of the house that it imports."""
    files = {dotted(path): path for path in python_files()}
    graph = {}
    for name, path in files.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = imported_modules(path.read_text(encoding="utf-8"), package)
        known = {other if other in files else other.rpartition(".")[0] for other in found}
        graph[name] = {other for other in known if other in files and other != name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            position = stack.index(node)
            if len(stack) - position > 1:
                found.append(sorted(stack[position:]))
            del stack[position:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_every_room_is_known() -> None:
    rooms = {p.parent.relative_to(ROOT).parts[1:2] for p in python_files() if p.parts[len(ROOT.parts)] == "rlvla"}
    assert {r[0] for r in rooms if r} <= set(FLOOR)


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    room = room_of(".".join(parts))
    assert room is not None
    assert misplaced(path.read_text(encoding="utf-8"), ".".join(parts[:-1]), room) == []


def test_there_are_no_circles() -> None:
    assert circles(module_imports()) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["d", "e"]]
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlvla.envs import base"
    assert imported_modules(code, "rlvla.envs")[-1] == "rlvla.envs.base"


# What would tie a room to one kind of policy: the name of an architecture, its bins, its tokens.
ONE_KIND = re.compile(r"OpenVLA|openvla\.|\b256\b|tokens_per_decision|num_action_tokens|n_action_bins")
# Lines outside rlvla/models in which these words mean something else, by file: a part of each line.
ELSEWHERE = {
    "rlvla/checkpoints/training.py": ["SHA-256"],
    "rlvla/replay/row_store.py": ["SHA-256"],
    "rlvla/utils/files.py": ["SHA-256"],
    "rlvla/data/libero.py": ["OpenVLA's `regenerate_libero_dataset.py`"],
    "rlvla/data/lerobot_writing.py": ["256 values", "(3, 256)", "minlength=256", "np.arange(256)"],  # of a pixel
    "rlvla/envs/config.py": ["LIBERO: 256"],
    "rlvla/envs/libero/env.py": ["IMAGE_SIZE"],
    "rlvla/envs/mujoco/light_assets.py": ["TEXTURE_SIZE"],
    "rlvla/rewards/config.py": ["        256,"],
    "rlvla/trainer/config.py": ["decisions per forward pass"],
    "rlvla/trainer/off_policy/config.py": ["train_batch_size", "hidden_sizes"],
    "rlvla/trainer/reward_sources.py": ["batch_size: int = 256"],
}


def one_kind_of_policy(path: str, text: str) -> list[str]:
    """Lines of a file that name what only one kind of policy has."""
    known = ELSEWHERE.get(path, [])
    return [line for line in text.splitlines() if ONE_KIND.search(line) and not any(words in line for words in known)]


def test_only_the_models_know_what_kind_of_policy_there_is() -> None:
    outside = [path for path in python_files() if not path.is_relative_to(ROOT / "rlvla" / "models")]
    found = {}
    for path in outside:
        name = path.relative_to(ROOT).as_posix()
        lines = one_kind_of_policy(name, path.read_text(encoding="utf-8"))
        if lines:
            found[name] = lines
    assert found == {}
    assert one_kind_of_policy("rlvla/trainer/config.py", "from rlvla.models.vla.openvla.x import OpenVLAConfig")
    assert one_kind_of_policy("rlvla/utils/files.py", "rows = 256")


@pytest.mark.parametrize(
    ("source", "room", "package"),
    [
        ("from rlvla.trainer.config import BatchConfig", "rollout", "rlvla.rollout"),
        ("def f():\n    import rlvla.models.actor", "envs", "rlvla.envs"),
        ("from ..envs import base", "rewards", "rlvla.rewards"),
        ("from rlvla import envs", "models", "rlvla.models"),
        ("from rlvla.utils.cli.flags import arg", "algorithms", "rlvla.algorithms"),
        ("import importlib\nimportlib.import_module('rlvla.trainer')", "utils", "rlvla.utils"),
        ("import cli.eval_vla", "commands", "rlvla.commands"),
        ("from rlvla.commands.setup import check_run", "trainer", "rlvla.trainer"),
        ("from rlvla.data.rows import DemonstrationRows", "rewards", "rlvla.rewards"),
        ("if TYPE_CHECKING:\n    from rlvla.trainer.config import BatchConfig", "envs", "rlvla.envs"),
        ("from rlvla.envs import base", "", "rlvla"),
    ],
)
def test_the_check_sees_every_way_to_import(source: str, room: str, package: str) -> None:
    assert len(misplaced(source, package, room)) == 1


def test_rewards_may_name_the_types_of_what_they_see() -> None:
    source = "if TYPE_CHECKING:\n    from rlvla.envs.base import Observation"
    assert misplaced(source, "rlvla.rewards", "rewards") == []


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
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
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
from rlvla import EnvPool, Experience, RolloutEngine, TaskSampler
try:
    from rlvla import Actor
except rlvla.MissingExtraError as error:
    assert "rlvla.Actor needs " in str(error) and "pip install rlvla" in str(error) and "\\n" not in str(error)
else:
    raise AssertionError("the policies need transformers")
"""
    )
