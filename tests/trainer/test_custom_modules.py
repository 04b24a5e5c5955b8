"""Code of the user's own, loaded before the flags are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.train_ppo_vla import build_parser
from cli.train_ppo_vla import main as train
from rlvla.envs import registry
from rlvla.trainer import custom_modules
from rlvla.trainer.custom_modules import (
    CustomConfig,
    load_custom_modules,
    modules_with_suites,
    parse_command_line,
    words_for_later_commands,
)
from rlvla.utils.errors import ConfigError
from rlvla.utils.logging import read_metrics

SUITE = """
from rlvla.envs.registry import get_suite, register_suite

register_suite("test_my_reach", get_suite("toy_reach"))
"""


@pytest.fixture(scope="module")
def module() -> str:
    return str(Path(__file__).with_name("own_algorithm.py"))


def test_choices_and_help_list_what_is_registered(module: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_command_line(build_parser, ["--custom_module", module, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "test_half_grpo" in printed and "test_double_ppo" in printed
    _, flags = parse_command_line(build_parser, [f"--custom_module={module}", "--policy_loss", "test_double_ppo"])
    assert flags.policy_loss == "test_double_ppo" and flags.given == {"custom_module", "policy_loss"}


def test_own_estimator_and_loss_train(module: str, policy_folder: Path, tmp_path: Path) -> None:
    train([
        *("--custom_module", module, "--advantage_estimator", "test_half_grpo", "--policy_loss", "test_double_ppo"),
        *("--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), "--num_episodes", "8"),
        *("--rollout_batch_size", "2", "--n_samples_per_prompt", "4", "--train_batch_size", "8", "--num_envs", "1"),
        *("--eval_episodes", "1", "--no-val_before_train", "--no-use_tensorboard", "--max_steps", "8"),
        "--no-check_start",
    ])  # fmt: skip
    (record,) = [r for r in read_metrics(tmp_path / "run") if "actor/pg_loss" in r]
    assert record["actor/pg_loss"] == pytest.approx(2 * record["actor/own"], abs=1e-6)


def test_only_modules_with_suites_go_to_the_workers(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_SUITES", dict(registry._SUITES))
    monkeypatch.setattr(custom_modules, "_with_suites", {})
    suite = tmp_path / "suite.py"
    suite.write_text(SUITE)
    sources = [module, str(suite)]
    load_custom_modules([word for source in sources for word in ("--custom_module", source)])
    assert modules_with_suites(CustomConfig(tuple(sources))) == [str(suite)]
    assert words_for_later_commands() == f" --custom_module {suite}"


def test_everything_that_cannot_be_loaded_is_told_at_once(tmp_path: Path) -> None:
    broken, taken = tmp_path / "broken.py", tmp_path / "taken.py"
    broken.write_text("x = 1\nimport nothing_of_that_name\n")
    taken.write_text(
        "from rlvla.algorithms import register_policy_loss\n@register_policy_loss('ppo')\ndef mine(): ...\n"
    )
    files = [str(tmp_path / "absent.py"), str(broken), str(taken)]
    with pytest.raises(ConfigError) as caught:
        load_custom_modules([word for file in files for word in ("--custom_module", file)])
    absent, syntax, name = caught.value.problems
    assert "absent.py" in absent and "does not exist" in absent
    assert "line 2 of broken.py, ModuleNotFoundError" in syntax
    assert "'ppo' already belongs to" in name


def test_a_flag_without_its_file_is_left_to_the_parser(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse_command_line(build_parser, ["--custom_module"])
    assert "--custom_module: expected one argument" in capsys.readouterr().err
