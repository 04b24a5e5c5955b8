"""Rounds of RECAP: the order of the commands, what they are given, and that an interrupted run continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli import recap_vla
from rlvla.commands import recap
from rlvla.commands.recap import RecapConfig, RoundCommands, run_recap
from rlvla.evaluation.results import Rate
from rlvla.utils.errors import ConfigError

PROGRAMS = {name: [name] for name in ("collect_demos", "train_value_vla", "train_sft_vla", "eval_vla")}
COMMANDS = RoundCommands(PROGRAMS, ["--learning_rate=1e-3"], ["--use_proprio"], ["--num_envs=1"])
SUCCESS = {"round_0": 3, "round_1": 6, "round_2": 5}


class Programs:
    """Writes what the commands would write.

    Attributes:
        broken: the command that is interrupted, half done.
        explained: explained variance of the return models.
    """

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.broken = ""
        self.explained = {"round_1": 0.3, "round_2": 0.06}

    def __call__(self, argv: list[str], log: Path) -> None:
        self.calls.append(argv)
        flags = dict(word.split("=", 1) for word in argv if "=" in word)
        written = Path(flags.get("--output") or flags["--save_path"])
        file = {"collect_demos": "demos.hdf5", "train_value_vla": "metrics.json", "train_sft_vla": "policy/weights"}
        path = written / file[argv[0]] if argv[0] in file else written
        resumes = "--load_checkpoint" in argv  # the commands refuse a folder that is there, unless they resume
        (written if argv[0] in file else path.parent).mkdir(parents=True, exist_ok=resumes)
        if self.broken and self.broken in str(log):
            raise KeyboardInterrupt
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(written))
        if argv[0] == "train_value_vla":
            path.write_text(json.dumps({"return_model/explained_variance": self.explained[written.parts[-2]]}))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    running = Programs()
    monkeypatch.setattr(recap, "run_logged", running)
    monkeypatch.setattr(recap, "success_of", lambda path: Rate.of([i < SUCCESS[path.parts[-3]] for i in range(10)]))
    return running


def test_rounds(programs: Programs, tmp_path: Path) -> None:
    start, folder = tmp_path / "start", tmp_path / "run"
    best = run_recap(RecapConfig(rounds=2, round_demos=7), start, ["demos"], folder, COMMANDS, seed=0)
    assert [argv[0] for argv in programs.calls] == [
        "eval_vla",
        *2 * ["collect_demos", "train_value_vla", "train_sft_vla", "eval_vla"],
    ]
    first, second = (programs.calls[i : i + 4] for i in (1, 5))
    assert f"--policy={start}" in first[0] and f"--policy={folder / 'round_1/sft/policy'}" in second[0]
    assert {"--keep=all", "--num_demos=7", "--temperature=1.0"} <= set(first[0])
    assert len({word for argv in (first[0], second[0]) for word in argv if word.startswith("--seed=")}) == 2
    own = [str(folder / f"round_{number}/own/demos.hdf5") for number in (1, 2)]
    for (_, value, training, _), number in ((first, 1), (second, 2)):
        for argv in (value, training):
            at = argv.index("--demos")
            assert [word for word in argv[at + 1 :] if not word.startswith("--")] == ["demos", *own[:number]]
        assert f"--pretrain={start}" in training, "every round trains the initial policy anew"
        assert f"--advantage_conditioning={folder / f'round_{number}/value'}" in training
    assert best == folder / "policy" and (best / "weights").read_text() == str(folder / "round_1/sft")
    record = json.loads((folder / "rounds.json").read_text())
    assert record["best"] == 1 and len(record["rounds"]) == 3


@pytest.mark.parametrize("broken", ["round_1/own", "round_1/value", "round_2/sft"])
def test_an_interrupted_run_continues(programs: Programs, tmp_path: Path, broken: str) -> None:
    arguments = RecapConfig(), tmp_path / "start", ["demos"], tmp_path / "run", COMMANDS
    programs.broken = broken
    with pytest.raises(KeyboardInterrupt):
        run_recap(*arguments, seed=0)
    done, programs.broken = len(programs.calls), ""
    run_recap(*arguments, seed=0)
    assert programs.calls[done - 1] == programs.calls[done], "the interrupted command is repeated"
    assert len(programs.calls) == 9 + 1
    run_recap(*arguments, seed=0)
    assert len(programs.calls) == 9 + 1, "nothing is repeated"
    with pytest.raises(ConfigError, match=r"other flags \(seed\)"):
        run_recap(*arguments, seed=1)


def test_rounds_end_with_the_best_policy_so_far_if_a_return_model_explains_nothing(
    programs: Programs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    programs.explained["round_2"] = 0.04
    best = run_recap(RecapConfig(rounds=3), tmp_path / "start", ["demos"], tmp_path / "run", COMMANDS, seed=0)
    assert (best / "weights").read_text() == str(tmp_path / "run" / "round_1/sft")
    assert [argv[0] for argv in programs.calls[-2:]] == ["collect_demos", "train_value_vla"]
    assert len(json.loads((tmp_path / "run" / "rounds.json").read_text())["rounds"]) == 2
    assert "explains 0.04" in caplog.text


def test_the_number_of_environments_may_change(programs: Programs, tmp_path: Path) -> None:
    for number in (1, 2):
        commands = replace(COMMANDS, common=[f"--num_envs={number}"])
        run_recap(RecapConfig(), tmp_path / "start", ["demos"], tmp_path / "run", commands, seed=0)
    assert len(programs.calls) == 9


def test_a_time_budget_of_one_training_is_not_one_of_all_rounds() -> None:
    assert "--max_minutes" not in recap_vla.build_parser()._option_string_actions


def test_mistakes_are_found_before_the_first_round(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--pretrain", str(tmp_path / "none"), "--save_path", str(tmp_path / "run"), "--max_steps", "5"]
    with pytest.raises(SystemExit):
        recap_vla.main([*words, "--advantage_conditioning", str(tmp_path)])
    text = capsys.readouterr().err
    assert all(part in text for part in ("give its folder", "--round_steps", "its own return model"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        run_recap(RecapConfig(), tmp_path, [], tmp_path / "other", COMMANDS, seed=0)
