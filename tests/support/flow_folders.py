"""Small flow-matching policies for toy_reach that act at random, and flags with which they are trained quickly."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact

TWO = {"q01": [-1.0, -1.0], "q99": [1.0, 1.0], "min": [-1.0, -1.0], "max": [1.0, 1.0], "mask": [True, True]}
TOY = ["--task_suite_name", "toy_reach", "--image_size", "16", "--use_proprio", "--max_steps", "8"]
# 8 episodes are two iterations in groups of 4; a machine that pays for coming near gives every run a gradient.
QUICK = [
    *TOY,
    *("--num_episodes", "16", "--rollout_batch_size", "2", "--n_samples_per_prompt", "4", "--train_batch_size", "4"),
    *("--advantage_estimator", "grpo", "--max_epochs", "2", "--num_envs", "1", "--eval_episodes", "2"),
    *("--reward", "rm:1.0", "--rm_formula", "F(near & F reached)", "--no-check_start", "--no-val_before_train"),
    *("--no-use_tensorboard", "--actor_learning_rate", "1e-3", "--deterministic_rollout"),
]


def write_flow(folder: Path, **options: object) -> Path:
    """A compact policy with a flow head whose velocity depends on everything."""
    sizes = {"channels": (8, 8), "kernels": (4, 3), "strides": (4, 2), "width": 32, "column_width": 16}
    config = CompactConfig(16, 1, 2, 2, 2, "flow", text_width=16, text_buckets=64, **(sizes | options))
    build_compact(folder, config, {"toy_reach": {"action": TWO, "proprio": TWO}})
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if "velocity_network.output" in name]:
        state[name] = 0.1 * torch.randn(state[name].shape, generator=generator)
    save_file(state, folder / "model.safetensors")
    return folder
