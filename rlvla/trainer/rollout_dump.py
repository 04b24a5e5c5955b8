"""Training rollouts on disk, in the layout of demonstrations: for later analysis, for scoring, as data of an SFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.envs.config import EnvConfig
from rlvla.experience import Sample
from rlvla.models.actor import Actor
from rlvla.trainer.demonstrations import LAST_OBS, DemonstrationWriter


def dump_rollouts(
    folder: Path, iteration: int, rank: int, samples: Sequence[Sample], env: EnvConfig, actor: Actor
) -> Path:
    """Write the episodes of an iteration and return the file, `folder/iteration_<i>_rank<r>/demos.hdf5`.

    Beside what demonstrations hold (pictures and proprio at decisions only, see `rlvla.trainer.demonstrations`), each
    episode has `rollout/action_tokens` [S, T], `rollout/log_probs` [S, T], `rollout/rewards/<source>` [steps], and
    `rollout/last_obs/`: pictures and proprio after the last action.

    Args:
        folder: of all dumps of the run.
        iteration: counted from 1.
        rank: of this process.
        samples: its episodes.
        env: what the policy sees.
        actor: decodes action tokens.
    """
    path = folder / f"iteration_{iteration:06d}_rank{rank}" / "demos.hdf5"
    record = env.as_dict() | {"cameras": list(env.camera_names), "task_suite_name": env.suite, "iteration": iteration}
    gripper = [dim for dim, normalised in enumerate(actor.inputs.action_mask) if not normalised]
    writer = DemonstrationWriter(path, record, env.camera_names, gripper)
    try:
        for sample in samples:
            writer.add(as_episode(sample, actor, env.camera_names), sample.task_id)
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return path


def as_episode(sample: Sample, actor: Actor, cameras: Sequence[str]) -> dict[str, Any]:
    """What `DemonstrationWriter.add` takes, with one row per executed environment step."""
    tokens = sample.action_tokens.numpy()
    actions = actor.inputs.decode_actions(tokens)  # [S, A, D]
    executed = sample.action_mask.numpy().reshape(actions.shape)[..., 0]  # [S, A]
    counts = executed.sum(1)
    more: dict[str, np.ndarray] = {
        "decision_steps": np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        "rollout/action_tokens": tokens,
        "rollout/log_probs": sample.rollout_log_probs.numpy(),
    }
    for camera, picture in zip(cameras, sample.last_images.numpy()):
        more[f"{LAST_OBS}/{camera}_image"] = picture
    if sample.env_proprio is not None and sample.last_proprio is not None:
        # The environment's own part: a machine's state may follow it.
        more[f"{LAST_OBS}/proprio"] = sample.last_proprio.numpy()[: sample.env_proprio.shape[1]]
    for name, values in sample.reward_components.items():
        more[f"rollout/rewards/{name}"] = values.numpy()[executed]
    return {
        "images": sample.images.numpy(),
        "proprio": None if sample.env_proprio is None else sample.env_proprio.numpy(),
        "actions": actions[executed].astype(np.float32),
        "rewards": sample.rewards.numpy()[executed],
        "instruction": sample.instruction,
        "init_state_id": sample.init_state_id,
        "seed": sample.seed,
        "success_at_end": sample.success_at_end,
        "more": more,
    }
