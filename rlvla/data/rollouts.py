"""Writing training rollouts in the layout of demonstrations, for analysis, scoring or supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.data.demonstrations import PLAYER, POLICY
from rlvla.data.robomimic import LAST_OBS, REWARDS, DemonstrationWriter
from rlvla.envs.config import TASK, EnvConfig
from rlvla.experience import Sample
from rlvla.models.policy import Policy


def dump_rollouts(
    folder: Path, iteration: int, rank: int, samples: Sequence[Sample], env: EnvConfig, policy: Policy
) -> Path:
    """Write the episodes of an iteration and return the file, `folder/iteration_<i>_rank<r>/demos.hdf5`.

    In addition to the content of demonstrations (images and proprio at decisions only, see `rlvla.data.robomimic`),
    each episode has its trace (`rollout/action_tokens` [S, K], or `rollout/trace/<name>`), `rollout/log_probs` [S, K],
    `rollout/rewards/<source>` [steps], `rollout/reward_info/<name>` (numbers that reward sources report), and in
    `rollout/last_obs/` images and proprio after the last action. Primitives are written as the actions they consist of.

    Args:
        folder: parent folder of the dumps of the run.
        iteration: number of the iteration, counted from 1.
        rank: rank of this process; each rank writes a separate file.
        samples: the episodes of this rank.
        env: environment options to record, see `EnvConfig.with_ordinary_actions`.
        policy: its `normalized_dims` define the statistics mask, unless it chooses primitives.
    """
    path = folder / f"iteration_{iteration:06d}_rank{rank}" / "demos.hdf5"
    record = env.as_dict() | {"cameras": list(env.camera_names), "task_suite_name": env.suite}
    record |= {"iteration": iteration, PLAYER: POLICY}
    gripper: Sequence[int] = [dim for dim, normalized in enumerate(policy.normalized_dims) if not normalized]
    if samples[0].step_actions is not None:
        gripper = env.tasks()[0].gripper_dims
    writer = DemonstrationWriter(path, record, env.camera_names, gripper)
    try:
        for sample in samples:
            episode = as_episode(sample, env.camera_names)
            if env.instruction_source in (None, TASK):  # a state of --rm_state_input is not recorded
                episode["instructions"] = None
            writer.add(episode, sample.task_id)
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return path


def as_episode(sample: Sample, cameras: Sequence[str]) -> dict[str, Any]:
    """An episode as `DemonstrationWriter.add` expects it, with one row per executed environment step."""
    executed = sample.executed.numpy()  # [S, A]
    images, proprio = sample.env_images.numpy(), sample.env_proprio
    counts = executed.sum(1)
    more: dict[str, np.ndarray] = {
        "decision_steps": np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        "rollout/log_probs": sample.log_probs.numpy(),
    }
    texts = [text for text, count in zip(sample.decision_instructions, counts) for _ in range(count)]
    for name, values in sample.trace.items():
        more["rollout/action_tokens" if name == "tokens" else f"rollout/trace/{name}"] = values.numpy()
    for camera, picture in zip(cameras, images[-1]):
        more[f"{LAST_OBS}/{camera}_image"] = picture
    if proprio is not None:
        more[f"{LAST_OBS}/proprio"] = proprio[-1].numpy()
    for name, values in sample.reward_components.items():
        more[f"{REWARDS}/{name}"] = values.numpy()[executed]
    for name, number in sample.reward_info.items():
        more[f"rollout/reward_info/{name}"] = np.asarray(number)
    return {
        "images": images[:-1],
        "proprio": None if proprio is None else proprio[:-1].numpy(),
        "actions": sample.played_actions.numpy(),
        "rewards": sample.rewards.numpy()[executed],
        "instruction": sample.instruction,
        "instructions": texts,
        "init_state_id": sample.init_state_id,
        "seed": sample.seed,
        "success_at_end": sample.success_at_end,
        "more": more,
    }
