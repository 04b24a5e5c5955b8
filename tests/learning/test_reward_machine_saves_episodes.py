"""The same networks and seed learn sooner with the reward machine: off-policy, from state, in little time.

`benchmarks/reward_machine_learning.py` measures the same with PPO, at length.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.train_sac_vla import main as train

LEARNING = [
    *("--custom_module", "tests/support/state_reach.py", "--task_suite_name", "state_reach", "--num_envs", "1"),
    *("--num_episodes", "144", "--random_episodes", "64", "--action_chunk_len", "3", "--gamma", "0.95"),
    *("--utd_ratio", "2", "--train_batch_size", "128", "--hidden_sizes", "64", "64", "--init_temperature", "0.02"),
    *("--actor_learning_rate", "1e-3", "--temperature_learning_rate", "1e-3", "--eval_episodes", "100"),
    *("--critic_learning_rate", "1e-3", "--no-val_before_train", "--no-use_tensorboard", "--quiet"),
]
# Seed 0, greedy on 100 held-out states after 144 episodes, success once: 0.25 alone, 0.78 with the machine.
CLEAR = 0.3

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(600)]


def success_after_training(folder: Path, *flags: str) -> float:
    train([*LEARNING, *flags, "--save_path", str(folder)])
    (evaluation,) = json.loads((folder / "evaluations.json").read_text())
    assert evaluation["success_once"]["n"] == 100 and evaluation["protocol"] == "heldout"
    return evaluation["success_once"]["rate"]


def test_the_machine_beats_success_alone(tmp_path: Path) -> None:
    machine = ["--reward", "success:1.0", "rm:1.0", "--rm_state_input", "proprio"]
    alone = success_after_training(tmp_path / "alone", "--reward", "success:1.0")
    both = success_after_training(tmp_path / "both", *machine)
    assert both >= alone + CLEAR, (alone, both)
