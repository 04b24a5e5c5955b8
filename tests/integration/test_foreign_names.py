"""A module is imported because a flag names it, never because a file does."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import pytest

from cli import (
    check_demos,
    collect_demos,
    convert_demos,
    eval_vla,
    inspect_vla,
    push_to_hub,
    score_episodes,
    train_ppo_vla,
    train_rm_vla,
    train_sft_vla,
    view_data,
)
from rlvla.checkpoints.policy_folder import ENVIRONMENT_FILE
from rlvla.commands import custom_modules
from rlvla.commands.custom_modules import words_for_later_commands
from rlvla.data.lerobot_writing import write_lerobot
from rlvla.data.reading import read_demonstrations
from rlvla.envs import registry
from rlvla.envs.gymnasium.env import _facts
from rlvla.envs.records import _warn

MODULE = "stranger_of_rlvla"
TINY = ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--no-use_tensorboard"]
BATCH = ["--rollout_batch_size", "2", "--train_batch_size", "2", "--num_episodes", "2", "--num_envs", "1"]
# Entries by which some program somewhere names code.
NAMES = {
    **dict.fromkeys(("module", "custom_module", "import", "package", "library", "plugin", "env_module"), MODULE),
    **{name: [MODULE] for name in ("custom_modules", "modules", "plugins", "requires", "imports")},
    **dict.fromkeys(("entry_point", "class_name", "factory", "env_name"), f"{MODULE}:Stranger"),
    **dict.fromkeys(("_target_", "__class__", "class", "type_path"), f"{MODULE}.Stranger"),
    "auto_map": {"AutoModel": f"{MODULE}.Stranger", "AutoConfig": f"{MODULE}.Stranger"},
    "trust_remote_code": True,
    "reward_fn": f"{MODULE}.py:reward",
    "task_sampler": f"{MODULE}.py:Sampler",
    "suite": f"gym:{MODULE}:Stranger-v0",
    "perturb": [MODULE],
    "expert": MODULE,
}
# What a record may name as its suite: with its module, and by an id that an installed package has registered.
SUITES = {"module": f"gym:{MODULE}:Stranger-v0", "registered": "gym:Stranger-v7"}


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """A module on the path; the result says whether this process or another one has imported it."""
    mark, folder = tmp_path / "imported", tmp_path / "modules"
    folder.mkdir()
    text = f"""
        from pathlib import Path
        Path({str(mark)!r}).touch()
        import gymnasium, numpy as np
        class Stranger(gymnasium.Env):
            metadata = {{"render_modes": ["rgb_array"]}}
            action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,))
            observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,))
            def __init__(self, render_mode=None): self.render_mode = render_mode
            def reset(self, *, seed=None, options=None): return np.zeros(4, np.float32), {{}}
            def step(self, action): return np.zeros(4, np.float32), 0.0, False, False, {{"success": False}}
            def render(self): return np.arange(3072, dtype=np.uint8).reshape(32, 32, 3)
        gymnasium.register("Stranger-v0", entry_point=Stranger, max_episode_steps=5)
    """
    lines = [line.removeprefix("        ") for line in text.splitlines()]
    (folder / f"{MODULE}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("_TRUSTED", "_GYM_MODULES"):
        monkeypatch.setattr(registry, name, {})
    for modules in ("_with_suites", "_with_policies"):
        monkeypatch.setattr(custom_modules, modules, {})
    gymnasium.register("Stranger-v7", entry_point=f"{MODULE}:Stranger", max_episode_steps=5)
    _warn.cache_clear()
    _facts.cache_clear()
    yield lambda: mark.exists() or MODULE in sys.modules
    sys.modules.pop(MODULE, None)
    for name in ("Stranger-v0", "Stranger-v7"):
        gymnasium.registry.pop(name, None)
    for suite in SUITES.values():
        registry._SUITES.pop(suite, None)


def planted(content: Any, suite: str, *, outermost: bool = True) -> Any:
    """A record with `NAMES` in each of its mappings, unless it has such an entry, and another suite."""
    if not isinstance(content, dict):
        return content
    inner = {name: planted(value, suite, outermost=False) for name, value in content.items()}
    more = {name: value for name, value in NAMES.items() if name not in content} if outermost else {}
    return inner | more | ({"task_suite_name": suite} if "task_suite_name" in content else {})


def foreign_policy(folder: Path, source: Path, suite: str) -> Path:
    shutil.copytree(source, folder)
    for name in (ENVIRONMENT_FILE, "config.json"):
        path = folder / name
        path.write_text(json.dumps(planted(json.loads(path.read_text()), suite)))
    return folder


def foreign_demos(folder: Path, source: Path, suite: str) -> Path:
    shutil.copytree(source.parent, folder)
    with h5py.File(folder / source.name, "a") as file:
        attributes = file["data"].attrs
        attributes["env_args"] = json.dumps(planted(json.loads(attributes["env_args"]), suite))
    return folder / source.name


def foreign_lerobot(folder: Path, source: Path, suite: str) -> Path:
    write_lerobot(folder, read_demonstrations(source), 20.0)
    info = folder / "meta" / "info.json"
    content = json.loads(info.read_text())
    info.write_text(json.dumps(planted(content, suite) | {"rlvla": planted(content["rlvla"], suite)}))
    return folder


def commands(policy: str, demos: str, out: Path) -> dict[str, tuple[Callable[..., Any], list[str]]]:
    """Every command that reads a policy folder or a data set."""
    run = ["--save_path", str(out / "run")]
    sft = ["--demos", demos, *run, "--max_steps", "2"]
    return {
        "eval": (eval_vla.main, ["--pretrain", policy, "--num_envs", "1", "--eval_episodes", "2"]),
        "ppo --dry_run": (train_ppo_vla.main, ["--pretrain", policy, *run, "--dry_run"]),
        "ppo": (train_ppo_vla.main, ["--pretrain", policy, *run, *BATCH, "--eval_episodes", "2"]),
        "inspect": (inspect_vla.main, ["--pretrain", policy]),
        "push": (push_to_hub.main, [policy, "--repo_id", "a/b", "--dry_run"]),
        "collect": (collect_demos.main, ["--policy", policy, "--num_demos", "1", "--output", str(out / "recorded")]),
        "check": (check_demos.main, [demos, "--output", str(out / "checked")]),
        "view --replay": (view_data.main, [demos, "--replay", "--output", str(out / "page.html")]),
        "convert": (
            convert_demos.main,
            ["--demos", demos, "--output", str(out / "lerobot"), "--format", "lerobot-v3.0"],
        ),
        "sft": (train_sft_vla.main, [*sft, "--action_chunk_len", "4", *TINY]),
        "sft of episodes": (
            train_sft_vla.main,
            [*sft, "--action_chunk_len", "4", *TINY, "--eval_epochs", "1", "--eval_episodes", "1"],
        ),
        "sft of a policy": (train_sft_vla.main, [*sft, "--pretrain", policy, "--no-use_tensorboard"]),
        "reward model": (train_rm_vla.main, ["--demos", demos, *run, *TINY]),
        "score": (
            score_episodes.main,
            ["--demos", demos, "--episodes", "0", "--reward", "success", "--output", str(out / "scores")],
        ),
    }


def ended(main: Callable[..., Any], argv: list[str]) -> int:
    """The exit code of a command, which refuses or goes on."""
    try:
        main(argv)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("kind", SUITES)
@pytest.mark.parametrize("command", commands("", "", Path()))
def test_no_command_imports_a_module_that_a_file_names(
    policy_folder: Path,
    demos_file: Path,
    tmp_path: Path,
    imported: Callable[[], bool],
    command: str,
    kind: str,
    capsys: pytest.CaptureFixture,
) -> None:
    policy = foreign_policy(tmp_path / "policy", policy_folder, SUITES[kind])
    formats = {"": foreign_demos}
    if command in ("check", "view --replay", "convert", "sft"):
        formats["lerobot"] = foreign_lerobot
    for name, write in formats.items():
        demos = write(tmp_path / f"demos{name}", demos_file, SUITES[kind])
        main, argv = commands(str(policy), str(demos), tmp_path / f"out{name}")[command]
        code = ended(main, argv)
        assert not imported(), f"{command} imported it (exit code {code})"
        error = capsys.readouterr().err
        assert "Traceback" not in error and "run with --help" not in error, error


@pytest.mark.parametrize("kind", SUITES)
@pytest.mark.parametrize("flag", ["custom_module", "task_suite_name"])
def test_the_error_names_the_flag_that_permits_it(
    policy_folder: Path,
    tmp_path: Path,
    imported: Callable[[], bool],
    capsys: pytest.CaptureFixture,
    kind: str,
    flag: str,
) -> None:
    policy = foreign_policy(tmp_path / "policy", policy_folder, SUITES[kind])
    asked = ["--pretrain", str(policy), "--save_path", str(tmp_path / "run"), "--dry_run"]
    assert ended(train_ppo_vla.main, asked) == 2
    error = " ".join(capsys.readouterr().err.split())
    given = {"custom_module": MODULE, "task_suite_name": SUITES[kind]}[flag]
    assert f"--{flag} {given}" in error and not imported()
    ended(train_ppo_vla.main, [*asked, f"--{flag}", given])  # whose environment does not fit the policy
    error = " ".join(capsys.readouterr().err.split())
    assert imported() and "which no flag names" not in error


def test_workers_and_another_interpreter_import_the_module_of_a_flag(
    tmp_path: Path, imported: Callable[[], bool], capsys: pytest.CaptureFixture
) -> None:
    from cli import check_env

    more = ["--use_proprio", "--output", str(tmp_path / "page.png")]
    check_env.main([SUITES["module"], "--env_python", sys.executable, *more])
    assert (tmp_path / "imported").exists() and MODULE not in sys.modules, "the other interpreter alone"
    assert words_for_later_commands() == ""
    check_env.main([SUITES["module"], *more])
    assert words_for_later_commands() == f" --custom_module {MODULE}", "commands on what it records"
