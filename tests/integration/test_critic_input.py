"""`--critic_input state`: whole runs, which differ from others in their critic alone, resume, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from cli.train_ppo_vla import main
from rlvla.checkpoints.training import list_checkpoints
from rlvla.envs.toy_reach.env import ToyReachOptions
from rlvla.utils.files import read_metrics
from tests.support import resume_cases
from tests.support.equality import assert_equal_to_the_bit, differences

FLAGS = [
    *("--rollout_batch_size", "4", "--train_batch_size", "2", "--num_envs", "1", "--deterministic_rollout"),
    *("--max_steps", "12", "--temperature", "1.5", "--reward", "success", "rm:0.5", "--rm_formula", "F(near)"),
    *("--actor_learning_rate", "1e-3", "--no-bootstrap_truncated", "--lora_rank", "4", "--normalize_values"),
    *("--save_steps", "1", "--max_ckpt_num", "9", "--dump_rollouts", "--eval_episodes", "2", "--no-val_before_train"),
    "--no-use_tensorboard",
]


@pytest.fixture(scope="module")
def runs(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One iteration with the usual critic, three with one on the state, and three broken off and continued."""
    folder = tmp_path_factory.mktemp("critics")
    flags = ["--pretrain", str(policy_folder), *FLAGS]
    names = {name: folder / name for name in ("observation", "state", "parts")}
    resume_cases.run([*flags, "--num_episodes", "4", "--save_path", str(names["observation"])])
    flags += ["--num_episodes", "12", "--critic_input", "state", "--save_path"]
    resume_cases.run([*flags, str(names["state"])])
    resume_cases.run([*flags, str(names["parts"])], stop_after=1)
    resume_cases.run([*flags, str(names["parts"]), "--load_checkpoint"])
    return names


def contents(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
    return found


def test_the_policy_acts_and_is_exported_as_with_any_other_critic(runs: dict[str, Path]) -> None:
    """To the bit: episodes of the first iteration, and, as all critics start at zero, the actor after it."""
    observation, state = runs["observation"], runs["state"]
    ours, theirs = (
        contents(run / "rollouts" / "iteration_000001_rank0" / "demos.hdf5") for run in (state, observation)
    )
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert any("action" in name for name in ours)
    first = [list_checkpoints(run / "checkpoints")[0] for run in (state, observation)]
    actors = [{path.name: torch.load(path) for path in (folder / "actor").rglob("*.pt")} for folder in first]
    assert actors[0] and not differences(*actors)
    ours, theirs = ({path.name for path in (run / "policy").rglob("*")} for run in (state, observation))
    records = [(run / "policy" / "rlvla_environment.json").read_text() for run in (state, observation)]
    assert ours == theirs and records[0] == records[1] and not json.loads(records[0])["object_state"]
    losses = [read_metrics(run)[0]["critic/vf_loss"] for run in (state, observation)]
    assert losses[0] != losses[1]


def test_it_resumes_to_the_bit(runs: dict[str, Path]) -> None:
    assert_equal_to_the_bit(runs["parts"], runs["state"])
    newest = list_checkpoints(runs["state"] / "checkpoints")[-1]
    moments = json.loads((newest / "trainer.json").read_text())["state_normalizer"]
    assert moments["count"] > 12 and len(moments["mean"]) == 1 + 4 and all(moments["squares"])


def test_a_suite_without_privileged_state_is_refused(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyReachOptions, "privileged_options", ())
    with pytest.raises(SystemExit):
        main(["--pretrain", str(policy_folder), "--critic_input", "state", "--save_path", str(tmp_path / "run")])
    said = " ".join(capsys.readouterr().err.split())
    assert "--critic_input state: toy_reach has no privileged state for a critic" in said and "toy_push" in said
    assert not (tmp_path / "run").exists()
