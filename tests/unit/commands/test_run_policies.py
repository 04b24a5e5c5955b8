"""Which policy the folder of a run stands for, and what its record says."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rlvla.commands import run_policies
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.run_policies import is_run_folder, newest_policy, policy_folder, recorded_run, with_policy_folder
from rlvla.commands.runs.checks import as_flat_dict
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import manifest_entry, write_manifest


def file(path: Path, age: float, content: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def checkpoint(run: Path, number: int, age: float) -> Path:
    folder = run / "checkpoints" / f"iteration_{number:06d}"
    weights = file(folder / "weights", age)
    write_manifest(folder, {weights: manifest_entry(weights)})
    os.utime(folder / "manifest.json", (1e9 - age, 1e9 - age))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has just begun."""
    file(tmp_path / "run" / "run_config.json", 100)
    return tmp_path / "run"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path]]:
    """(checkpoint, folder) of every policy that was taken from a checkpoint."""
    made: list[tuple[Path, Path]] = []

    def export(run: Path, checkpoint: Path, output: Path, env_python: str | None) -> None:
        made.append((checkpoint, output))
        for name in ("config.json", "rlvla_environment.json"):
            file(output / name, 0)

    monkeypatch.setattr(run_policies, "_export", export)
    return made


def test_other_folders_are_left_alone(tmp_path: Path, run: Path) -> None:
    policy = file(tmp_path / "policy" / "config.json", 0).parent
    assert policy_folder(str(policy)) == str(policy) and policy_folder("tiny") == "tiny"
    assert is_run_folder(run) and not is_run_folder(policy) and not is_run_folder(tmp_path / "none")


def test_a_run_without_anything_to_offer_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError) as error:
        policy_folder(str(run))
    assert [(p.flag, p.reason) for p in error.value.problems] == [("pretrain", "missing_file")]


def test_the_newest_complete_policy_is_chosen(run: Path, exported: list) -> None:
    first = checkpoint(run, 2, age=50)
    assert policy_folder(str(run)) == str(run / "exported" / first.name) and len(exported) == 1
    assert policy_folder(str(run)) == str(run / "exported" / first.name) and len(exported) == 1, "taken out once"

    newest = checkpoint(run, 4, age=40)
    file(run / "policies" / newest.name / "rlvla_environment.json", 39)
    assert newest_policy(run).folder == run / "policies" / newest.name, "what --save_hf_ckpt wrote"

    for name in ("config.json", "rlvla_environment.json"):
        file(run / "policy" / name, 30)
    assert policy_folder(str(run)) == str(run / "policy")

    (checkpoint(run, 6, age=20) / "weights").write_text("damaged")
    assert policy_folder(str(run)) == str(run / "policy"), "a damaged checkpoint does not count"
    later = checkpoint(run, 8, age=10)
    assert policy_folder(str(run)) == str(run / "exported" / later.name), "the run was resumed"


def test_ranks_do_not_export_at_the_same_time(run: Path, exported: list, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(run, 2, age=50)
    monkeypatch.setattr(run_policies, "launched_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="export_policy"):
        policy_folder(str(run))
    assert not exported


def test_a_supervised_run_stands_for_its_policy(tmp_path: Path) -> None:
    run = file(tmp_path / "config.yaml", 0).parent
    for name in ("config.json", "rlvla_environment.json"):
        file(run / "policy" / name, 5)
    assert policy_folder(str(run)) == str(run / "policy")


@pytest.fixture
def flags() -> PPORun:
    return PPORun(**{name: kind() for name, kind in PPORun.kinds().items()})


def test_the_flags_of_a_run_are_read_back(run: Path, flags: PPORun) -> None:
    changed = replace(
        flags,
        policy=replace(flags.policy, pretrain="start"),
        batch=replace(flags.batch, num_episodes=17),
        algorithm=AlgorithmConfig.from_flags(policy_loss="gspo", eps_clip_low_high=(0.2, 0.28)),
        env=replace(flags.env, task_suite_name="toy_reach", cameras=("front",), image_size=32),
    )
    groups = {name: as_flat_dict(group) for name, group in changed.groups.items() if name != "env"}
    del groups["algorithm"]["gamma"], groups["guards"]  # an older run
    file(run / "run_config.json", 0, json.dumps(groups | {"env": changed.env.as_dict()}))
    file(run / "config.yaml", 0, "env_python: /other/python")
    read = recorded_run(run)
    assert read.env.env_python is None and read.env.image_size == 32, "no record decides what is run"
    env = replace(read.env, options={})
    assert replace(read, env=env) == replace(changed, env=replace(changed.env, options={}))


def test_a_resumed_run_keeps_what_it_started_from(run: Path, flags: PPORun, tmp_path: Path, exported: list) -> None:
    """Meanwhile the run that it started from has gone on."""
    newest = checkpoint(run, 4, age=10)
    asked = replace(flags, policy=replace(flags.policy, pretrain=str(run)))
    first = with_policy_folder(asked)
    assert first.policy.pretrain == str(run / "exported" / newest.name)
    save_path = tmp_path / "second"
    file(save_path / "run_config.json", 0, json.dumps({"policy": vars(first.policy)}))
    checkpoint(run, 6, age=5)
    again = replace(asked, run=replace(flags.run, save_path=str(save_path), load_checkpoint=True))
    assert with_policy_folder(again).policy.pretrain == first.policy.pretrain and len(exported) == 1
    assert with_policy_folder(asked).policy.pretrain.endswith("iteration_000006")


def test_a_critic_starts_from_the_policy_of_a_run(run: Path, flags: PPORun, tmp_path: Path, exported: list) -> None:
    newest = checkpoint(run, 4, age=10)
    asked = replace(flags, run=replace(flags.run, critic_pretrain=str(run)))
    first = with_policy_folder(asked)
    assert first.run.critic_pretrain == str(run / "exported" / newest.name) and first.policy == flags.policy
    save_path = tmp_path / "second"
    file(save_path / "run_config.json", 0, json.dumps({"run": vars(first.run)}))
    checkpoint(run, 6, age=5)
    again = replace(asked, run=replace(asked.run, save_path=str(save_path), load_checkpoint=True))
    assert with_policy_folder(again).run.critic_pretrain == first.run.critic_pretrain


def test_runs_without_policies_are_refused_for_both_flags(run: Path, flags: PPORun) -> None:
    asked = replace(
        flags,
        policy=replace(flags.policy, pretrain=str(run)),
        run=replace(flags.run, critic_pretrain=str(run)),
    )
    with pytest.raises(ConfigError) as error:
        with_policy_folder(asked)
    assert [(p.flag, p.reason) for p in error.value.problems] == [
        ("pretrain", "missing_file"),
        ("critic_pretrain", "missing_file"),
    ]
