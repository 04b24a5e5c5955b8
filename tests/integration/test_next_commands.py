"""The `next:` commands that training prints run as they are: from elsewhere, with odd folders and own modules."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import train_sft_vla
from rlvla.commands import custom_modules, train_sft
from rlvla.commands.custom_modules import words_for_later_commands
from rlvla.envs import registry
from rlvla.trainer.supervised.verdict import Verdict
from tests.conftest import ROOT

TINY = ["--pretrain", "compact", "--no-use_tensorboard", "--action_chunk_len", "4", "--max_epochs", "1"]
PPO = ["--rollout_batch_size", "2", "--n_samples_per_prompt", "4", "--train_batch_size", "8", "--num_episodes", "8"]
PPO += ["--num_envs", "1", "--max_steps", "8", "--eval_episodes", "1", "--advantage_estimator", "grpo"]
PPO += ["--no-val_before_train", "--no-use_tensorboard", "--no-check_start"]


@pytest.fixture(autouse=True)
def without_earlier_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name the modules that their process has loaded, among them those of earlier tests."""
    for modules in ("_with_suites", "_with_policies"):
        monkeypatch.setattr(custom_modules, modules, {})
    monkeypatch.setattr(registry, "_TRUSTED", {})


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Run a command as a file of the checkout; the result is the command that it prints as the next one."""

    def run(script: Path, argv: list[str]) -> str:
        assert script.is_file(), script
        monkeypatch.setattr(sys, "argv", [str(script), *argv])
        importlib.import_module(f"cli.{script.stem}").main(argv)
        commands = re.findall(r"^next: (.*)", capsys.readouterr().out, re.MULTILINE)
        return commands[-1] if commands else ""

    return run


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another working directory."""
    folder = tmp_path / "my work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def words(command: str) -> tuple[Path, list[str]]:
    python, script, *argv = shlex.split(command)
    assert python == "python"
    return Path(script), argv


def test_from_supervised_training_to_an_evaluation(
    demos_file: Path, elsewhere: Path, called: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: dict[str, Callable[[Verdict], str]] = {}
    original = train_sft._next_command
    monkeypatch.setattr(
        train_sft,
        "_next_command",
        lambda verdict, *rest: verdicts.update(of=lambda v: original(v, *rest)) or original(verdict, *rest),
    )
    argv = ["--demos", str(demos_file), *TINY, "--save_path", "my runs/sft/"]
    called(ROOT / "cli/train_sft_vla.py", argv)
    of = verdicts["of"]

    script, argv = words(of(Verdict((), ("epochs",), "no", False)))
    assert script.name == "train_sft_vla.py"
    assert train_sft_vla.build_parser().parse_args(argv).demos == [str(demos_file)]
    assert argv[argv.index("--save_path") + 1] == "my runs/sft_longer"

    script, argv = words(of(Verdict((), ("data",), "no")))
    called(ROOT / script, [*argv, "--num_demos", "1"])
    assert argv[-2:] == ["--output", "my runs/sft_demos"]
    assert "--use_proprio" in argv and (elsewhere / "my runs/sft_demos/demos.hdf5").is_file()

    script, argv = words(of(Verdict((), (), "ready")))
    assert argv[-2:] == ["--save_path", "my runs/sft_ppo"]
    called(ROOT / script, [*argv, *PPO, "--dry_run"])


def test_a_reward_model_scores_its_data(demos_file: Path, elsewhere: Path, called: Callable[..., str]) -> None:
    recorded = ["--task_suite_name", "toy_reach", "--num_demos", "30", "--keep", "all", "--output", "my data"]
    recorded += ["--offset_prob", "0.5", "--offset_max", "0.6"]
    (elsewhere / "runs/sft").mkdir(parents=True)
    script, argv = words(called(ROOT / "cli/collect_demos.py", recorded))
    assert argv == ["--demos", "my data/demos.hdf5", "--pretrain", "compact", "--save_path", "runs/sft_2"]
    argv = ["--demos", "my data", "--save_path", "my rm", "--max_epochs", "1", "--no-use_tensorboard"]
    command = called(ROOT / "cli/train_rm_vla.py", [*argv, "--pretrain", "compact"])
    script, argv = words(command)
    called(script, argv)
    assert (elsewhere / "my rm/scores/scores.json").is_file()


@pytest.mark.usefixtures("own_suites")
def test_modules_of_suites_and_policies_are_named(elsewhere: Path, called: Callable[..., str]) -> None:
    from tests.support.own_policy import write_new

    (elsewhere / "suite.py").write_text((ROOT / "tests/support/mirrored_reach.py").read_text())
    start = write_new(elsewhere / "start")
    family = (ROOT / "tests/support/own_policy.py").read_text().replace('"test_mlp"', '"test_mlp_elsewhere"')
    (elsewhere / "family.py").write_text(family)
    config = start / "config.json"
    config.write_text(config.read_text().replace("test_mlp", "test_mlp_elsewhere"))
    modules = ["--custom_module", "suite.py", "--custom_module", "family.py"]
    argv = [*modules, "--pretrain", "start", "--task_suite_name", "mirrored_reach", "--use_proprio", *PPO]
    command = called(ROOT / "cli/train_ppo_vla.py", [*argv, "--save_path", "my run"])
    script, argv = words(command)
    assert script == ROOT / "cli/eval_vla.py", "cli/ is not in the working directory"
    assert words_for_later_commands("my python").endswith(" --env_python 'my python'")
    assert argv == ["--pretrain", "my run/policy", "--report", "my run/report", *modules]
    called(script, [*argv, "--eval_episodes", "1", "--num_videos", "0"])
    assert (elsewhere / "my run/report/report.html").is_file()
