"""What `--rollout_backend vllm` refuses before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.train_ppo_vla import build_parser
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.train_ppo import run_ppo
from rlvla.models.families import check_checkpoint
from rlvla.rollout.config import ROLLOUT_BACKENDS, BackendConfig, BackendSetup
from rlvla.rollout.vllm import backend
from rlvla.rollout.vllm.backend import VLLMBackend, interpreter
from rlvla.utils.errors import ConfigError
from tests.support.autoregressive import write_autoregressive
from tests.support.flow_folders import write_flow


def kinds(error: ConfigError) -> set[tuple[str | None, str]]:
    return {(p.flag, p.reason) for p in error.problems}


def refused(policy: Path, save_path: Path, *flags: str) -> ConfigError:
    """Why a run does not start; nothing is written."""
    given = ["--pretrain", str(policy), "--save_path", str(save_path), "--max_steps", "12", *flags]
    with pytest.raises(ConfigError) as error:
        run_ppo(PPORun.from_namespace(build_parser().parse_args(given)))
    assert not save_path.exists()
    return error.value


def test_a_policy_of_chunks_is_refused_with_what_else_is_wrong(policy_folder: Path, tmp_path: Path) -> None:
    error = refused(policy_folder, tmp_path / "run", "--rollout_backend", "vllm", "--rollout_python", sys.executable)
    assert kinds(error) == {("rollout_backend", "unsupported"), ("rollout_python", "unavailable")}
    assert "computes all tokens of a decision in one pass" in str(error)
    assert f"{sys.executable} has no vllm; bash examples/scripts/install_vllm.sh" in str(error)


def test_the_interpreter_is_read_by_no_other_backend(policy_folder: Path, tmp_path: Path) -> None:
    error = refused(policy_folder, tmp_path / "run", "--rollout_python", sys.executable)
    assert kinds(error) == {("rollout_python", "no_effect")}


def test_flow_policies_are_refused(tmp_path: Path) -> None:
    setup = BackendSetup(checkpoint=check_checkpoint(write_flow(tmp_path / "flow")))
    problems = {p.flag: p for p in VLLMBackend.problems(setup)}
    assert "this policy has continuous actions" in problems["rollout_backend"].text


def test_a_policy_that_decodes_token_by_token_is_not_refused(tmp_path: Path) -> None:
    setup = BackendSetup(checkpoint=check_checkpoint(write_autoregressive(tmp_path / "policy")))
    assert "rollout_backend" not in {p.flag for p in VLLMBackend.problems(setup)}


def test_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend.rlvla, "__file__", str(tmp_path / "checkout" / "rlvla" / "__init__.py"))
    setup = BackendSetup()
    (problem,) = VLLMBackend.problems(setup)
    assert (problem.flag, problem.reason) == ("rollout_python", "missing_file") and "install_vllm.sh" in problem
    (problem,) = VLLMBackend.problems(replace(setup, config=BackendConfig(rollout_python="/nowhere")))
    assert (problem.flag, problem.reason) == ("rollout_python", "unavailable") and "/nowhere" in problem
    for folder in (tmp_path / "checkout", tmp_path):  # the nearer one is preferred
        python = folder / ".venv-vllm" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        assert interpreter(None) == str(python)
    assert interpreter("other") == "other"


def test_it_is_registered() -> None:
    assert ROLLOUT_BACKENDS.get("vllm") is VLLMBackend
