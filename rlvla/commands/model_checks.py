"""Checks that critic, reward models and demonstrations fit the policy's observations, made before a run is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.checkpoints.policy_folder import recorded_environment
from rlvla.commands.new_models import not_square_problems
from rlvla.commands.setup import CheckedRun
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.replayed_episodes import recorded_env
from rlvla.envs.config import EnvConfig
from rlvla.envs.pictures import NATIVE
from rlvla.envs.registry import get_suite
from rlvla.models.families import check_checkpoint
from rlvla.models.policy import PolicySpec
from rlvla.rewards import RewardConfig
from rlvla.rewards.success_source import SIMULATOR
from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun


@dataclass(frozen=True)
class ObservationSpec:
    """The observations that the models of a run receive.

    Attributes:
        env: suite, cameras, size and rendering of the images.
        proprio_dim: length of the proprio vector; 0 if there is none.
    """

    env: EnvConfig
    proprio_dim: int

    @classmethod
    def of(cls, setting: CheckedRun) -> ObservationSpec:
        """Observations of a run, without the state of a reward machine, which only the policy receives."""
        length = setting.spec.proprio_dim
        return cls(setting.env, length - setting.state_width if length else 0)


def observation_problems(folder: str | Path, spec: PolicySpec, shown: ObservationSpec) -> list[Problem]:
    """Why a model cannot use these observations, or was trained on different ones.

    Camera names are compared only if they belong to the suite; datasets from other sources have different names.

    Args:
        folder: folder of the model, which may record the observations that it was trained on.
        spec: facts of the model.
        shown: the observations it would receive.
    """
    problems: list[Problem] = []

    def add(reason: str, text: str) -> None:
        problems.append(Problem(None, reason, f"{folder} {text}"))

    cameras, suite = shown.env.camera_names, get_suite(shown.env.suite)
    recorded = recorded_environment(folder)
    trained = tuple(recorded.get("cameras") or ())
    is_same = recorded.get("task_suite_name") == shown.env.suite
    of_suite = set(trained) <= set(suite.cameras) or is_same and suite.options and suite.options.has_more_cameras
    names = ", ".join(cameras)
    if spec.cameras not in (None, len(cameras)):
        add("image_count", f"takes {spec.cameras} image(s), but --cameras selects {len(cameras)}: {names}")
    elif trained != cameras and trained and of_suite:
        before = ", ".join(trained)
        add("cameras", f"was trained on the camera(s) {before}, and would be shown {names}; train one on these")
    if shown.env.image_fit == NATIVE and not spec.keeps_aspect_ratio:
        add("image_size", f"takes square images; --image_fit {NATIVE} keeps the camera's shape")
    size = shown.env.image_size or suite.default_image_size
    if spec.image_size not in (None, size):
        add("image_size", f"takes images of {spec.image_size} pixels; these have {size}")
    quality, now = recorded.get("render_quality"), shown.env.render_quality or "fast"
    if quality not in (None, now):
        add("render_quality", f"was trained on --render_quality {quality}, and would be shown {now}; train one on that")
    if spec.proprio_dim not in (0, shown.proprio_dim):
        available = f"there are {shown.proprio_dim}" if shown.proprio_dim else "there is none (--use_proprio)"
        add("proprio_dims", f"takes {spec.proprio_dim} numbers of proprioception; {available}")
    return problems


def value_model_problems(flags: PPORun, setting: CheckedRun | None) -> list[Problem]:
    """Problems of the critic's folder and, with a checked run, of the observations of critic and reward models."""
    if setting is None:
        return _critic_problems(flags, None, None)
    shown = ObservationSpec.of(setting)
    of_sources = source_problems(flags.rewards, shown, flags.success.success_source)
    return _critic_problems(flags, setting, shown) + of_sources


def source_problems(rewards: RewardConfig, shown: ObservationSpec, success_source: str = SIMULATOR) -> list[Problem]:
    """Problems if reward models get other observations than in training; bad folders are reported by the sources."""
    asked = {success_source, *rewards.source_names}
    folders = {
        "rm_model_path": rewards.rm_model_path if "rm_model" in asked else None,
        "reward_pretrain": rewards.reward_pretrain,
    }
    return folder_problems(folders, shown)


def folder_problems(folders: Mapping[str, str | None], shown: ObservationSpec) -> list[Problem]:
    """Problems of the observations for reward models, given as flag -> folder."""
    problems = []
    for flag, folder in folders.items():
        try:
            if folder is not None:
                spec = check_checkpoint(folder).spec
                problems += [p.of_flag(flag) for p in observation_problems(folder, spec, shown)]
        except ConfigError:
            continue
    return problems


def recorded_source_problems(rewards: RewardConfig, demos: Demonstrations) -> list[Problem]:
    """`source_problems` for recorded episodes that are replayed to be scored."""
    proprio = demos.proprio[0].shape[1] if demos.proprio else 0
    return source_problems(rewards, ObservationSpec(recorded_env(demos), proprio))


def _critic_problems(flags: PPORun, setting: CheckedRun | None, shown: ObservationSpec | None) -> list[Problem]:
    folder = flags.critic_folder
    if not folder:
        return []
    flag = "critic_pretrain" if flags.run.critic_from == "policy" else "critic_from"
    key, overrides = (setting.checkpoint.unnorm_key, setting.overrides) if setting else (flags.policy.unnorm_key, None)
    try:
        critic = check_checkpoint(folder, key, flags.env.task_suite_name, overrides)
        spec, problems = critic.spec, []
        if setting is not None and shown is not None:
            valued, acted = (f"{c.action_chunk_len} x {c.action_dim}" for c in (spec, setting.spec))
            if valued != acted:
                text = f"{folder} values chunks of {valued} action tokens; the policy acts in {acted}"
                text += ": train one with its --action_chunk_len"
                problems.append(Problem("critic_pretrain", "action_shape", text))
            # Unlike a reward model, the critic observes the machine state, as the policy does.
            seen = replace(shown, proprio_dim=setting.spec.proprio_dim)
            # It reads what the policy has prepared: where that resizes, the size of the environment's images is open.
            sized = spec.image_size if setting.spec.image_size is not None else None
            unlike = observation_problems(folder, replace(spec, image_size=sized), seen)
            if not unlike and (differences := critic.preparation_differences(setting.checkpoint)):
                text = f"{folder} prepares observations differently ({', '.join(differences)})"
                text += "; train a critic from this policy, or leave the flag out"
                unlike = [Problem("critic_pretrain", "mismatch", text)]
            problems += unlike
    except ConfigError as error:
        problems = error.problems
    return [p.of_flag(flag) for p in problems]


def mismatch_with_policy(demos: Demonstrations, path: str, spec: PolicySpec, folder: str) -> list[Problem]:
    """Why a policy cannot be trained on demonstrations: dimensions, cameras, image size, proprioception.

    Args:
        demos: the demonstrations.
        path: their path, for messages.
        spec: dimensions and properties of the policy.
        folder: its folder, for messages.
    """
    problems = []

    def add(reason: str, text: str) -> None:
        problems.append(Problem("demos", reason, text))

    cameras, size = demos.images[0].shape[1], demos.image_shape[0]
    dims = demos.actions[0].shape[1]
    if dims != spec.action_dim:
        add("action_dims", f"{path} has {dims} action dimensions; {folder} predicts {spec.action_dim}")
    if spec.cameras not in (None, cameras):
        add("cameras", f"{path} has {cameras} camera(s); {folder} takes {spec.cameras}; choose with --cameras")
    if not spec.keeps_aspect_ratio and (wrong := not_square_problems(demos, path, folder)):
        problems += wrong
    elif spec.image_size not in (None, size):
        add("image_size", f"{path} has images of {size} pixels; {folder} takes {spec.image_size}")
    if spec.proprio_dim and demos.proprio is None:
        add("no_proprio", f"{folder} takes proprioception, which {path} does not hold")
    elif spec.proprio_dim and demos.proprio and (length := demos.proprio[0].shape[1]) != spec.proprio_dim:
        add("proprio_dims", f"{path} has {length} numbers of proprioception; {folder} takes {spec.proprio_dim}")
    return problems
