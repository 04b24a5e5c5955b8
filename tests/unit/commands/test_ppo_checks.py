"""Flags of a run that is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.runs.checks import changed_flags, describe
from rlvla.envs.config import EnvConfig
from rlvla.utils.cli.flags import fail
from rlvla.utils.errors import ConfigError

SETTING = SimpleNamespace(env=EnvConfig(task_suite_name="toy_reach"))


@pytest.fixture
def flags(tmp_path: Path) -> PPORun:
    """Of a run to resume that was started before there were judges, filters of metrics and weights of tasks."""
    groups = {name: config() for name, config in PPORun.kinds().items()}
    groups["run"] = replace(groups["run"], save_path=str(tmp_path), load_checkpoint=True)
    flags = PPORun(**groups)
    recorded = describe(flags, SETTING)
    del recorded["success"], recorded["batch"]["task_weights"], recorded["algorithm"]["normalize_reward"]
    (tmp_path / RUN_FILE).write_text(json.dumps(recorded))
    (tmp_path / "policy").mkdir()
    return flags


def test_flags_newer_than_the_run_have_their_defaults(flags: PPORun) -> None:
    assert not changed_flags(flags, SETTING)
    newer = replace(
        flags,
        success=replace(flags.success, success_source="vlm"),
        batch=replace(flags.batch, task_weights=("0:2",)),
        algorithm=replace(flags.algorithm, normalize_reward=True),
    )
    changed = {(problem.flag, problem.reason) for problem in changed_flags(newer, SETTING)}
    assert changed == {(name, "changed") for name in ("success_source", "task_weights", "normalize_reward")}


def test_several_changed_settings_are_one_sentence_and_a_table(
    flags: PPORun, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of another run in the folder, which would be a line of two hundred characters for each of many flags."""
    other = replace(
        flags,
        run=replace(flags.run, seed=9),
        algorithm=replace(flags.algorithm, gamma=0.5, reward_clip_range=(-1.0, 2.0)),
    )
    with pytest.raises(SystemExit):
        fail("train_ppo_vla.py", ConfigError([*changed_flags(other, SETTING), "another problem"]))
    _, sentence, head, _, *rows, last = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"  - --save_path {tmp_path}: the run there has other settings; repeat them")
    assert head.split() == ["setting", "there", "now"] and last == "  - another problem"
    assert sorted(row.split() for row in rows) == [
        ["--gamma", "1.0", "0.5"],
        ["--reward_clip_range", "not", "given", "-1.0", "2.0"],
        ["--seed", "0", "9"],
    ]


def test_flags_are_compared_when_the_checkpoints_are_elsewhere(flags: PPORun, tmp_path: Path) -> None:
    """The disk was full, and the only checkpoint went to the fallback folder."""
    (tmp_path / "policy").rmdir()
    assert not changed_flags(replace(flags, run=replace(flags.run, seed=9)), SETTING), "it had saved nothing"
    elsewhere = tmp_path.with_name("elsewhere")
    (elsewhere / "iteration_000004").mkdir(parents=True)
    again = replace(flags, run=replace(flags.run, seed=9, ckpt_path=str(elsewhere)))
    assert [problem.flag for problem in changed_flags(again, SETTING)] == ["seed"]
