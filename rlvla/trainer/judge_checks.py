"""Whether critic and reward models can judge what the policy is shown, found before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.envs.config import EnvConfig
from rlvla.envs.registry import get_suite
from rlvla.models.value_models import REWARD_HEAD_FILE
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.rewards import RewardConfig
from rlvla.trainer.demonstrations import Demonstrations
from rlvla.trainer.policy_export import recorded_environment
from rlvla.trainer.recorded_episodes import recorded_env
from rlvla.trainer.setup import Setting, check_checkpoint
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.trainer.ppo_run import PPORun


@dataclass(frozen=True)
class Shown:
    """What the models of a run are shown.

    Attributes:
        env: suite, cameras, size and rendering of the images.
        proprio_dim: length of the proprio vector; 0: none.
    """

    env: EnvConfig
    proprio_dim: int


def sight_problems(folder: str | Path, config: OpenVLAConfig, shown: Shown) -> list[str]:
    """Why a model of this configuration cannot judge what is shown, or would judge something else.

    Names of cameras are compared where they are those of the suite; a data set made elsewhere has names of its own.

    Args:
        folder: where the model comes from; what it was trained to see is recorded there, if anything is.
        config: of the model.
        shown: what it would be shown.
    """
    found = []
    cameras, suite = shown.env.camera_names, get_suite(shown.env.suite)
    recorded = recorded_environment(folder)
    known = tuple(recorded.get("cameras") or ())
    if config.num_images_in_input not in (None, len(cameras)):
        found.append(f"{folder} takes {config.num_images_in_input} image(s); there are those of {', '.join(cameras)}")
    elif known != cameras and known and set(known) <= set(suite.cameras):
        found.append(
            f"{folder} was trained on the camera(s) {', '.join(known)}, and would be shown {', '.join(cameras)}; train "
            "one on these"
        )
    size = shown.env.image_size or suite.image_size
    if config.image_preprocessing == "none" and not config.center_crop and size != config.image_size:
        found.append(f"{folder} takes images of {config.image_size} pixels; these have {size}")
    quality, own = recorded.get("render_quality"), shown.env.render_quality or "fast"
    if quality not in (None, own):
        found.append(
            f"{folder} was trained on --render_quality {quality}, and would be shown {own}; train one on these"
        )
    if config.use_proprio and config.proprio_dim != shown.proprio_dim:
        there_are = f"there are {shown.proprio_dim}" if shown.proprio_dim else "there is none (--use_proprio)"
        found.append(f"{folder} takes {config.proprio_dim} numbers of proprioception; {there_are}")
    return found


def judge_problems(flags: PPORun, setting: Setting | None) -> list[str]:
    """What is wrong with the folders of critic and reward models; with a checked setting, what they see as well."""
    shown = None
    if setting is not None:
        config, told = setting.config, setting.state_input
        width = told.settings.width if told else 0  # no reward model is told the state of a machine
        shown = Shown(setting.env, config.proprio_dim - width if config.use_proprio else 0)
    found = _critic_problems(flags, setting, shown) + _reward_model_problems(flags, shown)
    if shown is not None:
        found += source_problems(flags.rewards, shown)
    return found


def source_problems(rewards: RewardConfig, shown: Shown) -> list[str]:
    """Whether the model of `--reward rm_model` sees what it was trained on. Of its folder the source itself tells."""
    asked = {spec.partition(":")[0] for spec in rewards.reward}
    if "rm_model" not in asked or rewards.rm_model_path is None:
        return []
    try:
        config, _ = check_checkpoint(Path(rewards.rm_model_path), None)
        return [f"--rm_model_path: {problem}" for problem in sight_problems(rewards.rm_model_path, config, shown)]
    except ConfigError:
        return []


def recorded_source_problems(rewards: RewardConfig, demos: Demonstrations) -> list[str]:
    """The same for recorded episodes that are played again to be scored."""
    proprio = demos.proprio[0].shape[1] if demos.proprio else 0
    return source_problems(rewards, Shown(recorded_env(demos), proprio))


def _critic_problems(flags: PPORun, setting: Setting | None, shown: Shown | None) -> list[str]:
    folder = flags.run.critic_pretrain
    if not folder:
        return []
    key, overrides = (setting.unnorm_key, setting.overrides) if setting else (flags.policy.unnorm_key, None)
    try:
        config, _ = check_checkpoint(Path(folder), key, flags.env.task_suite_name, overrides)
        found = []
        if setting is not None and shown is not None:
            own, policy = [(c.action_chunk_len, c.action_dim) for c in (config, setting.config)]
            if own != policy:
                found.append(
                    f"{folder} values chunks of {own[0]} x {own[1]} action tokens; the policy acts in {policy[0]} x "
                    f"{policy[1]}"
                )
            # Unlike a reward model it is told the state of a machine, as the policy is.
            length = setting.config.proprio_dim if setting.config.use_proprio else 0
            found += sight_problems(folder, config, replace(shown, proprio_dim=length))
    except ConfigError as error:
        found = error.problems
    return [f"--critic_pretrain: {problem}" for problem in found]


def _reward_model_problems(flags: PPORun, shown: Shown | None) -> list[str]:
    """Of `--reward_pretrain`."""
    folder = flags.run.reward_pretrain
    if not folder:
        return []
    found = []
    if flags.rewards.rm_state_input != "none":
        found.append("--reward_pretrain judges what the policy sees: with --rm_state_input use --reward rm_model")
    try:
        config, _ = check_checkpoint(Path(folder), None)
        if not (Path(folder) / REWARD_HEAD_FILE).is_file():
            found.append(f"--reward_pretrain: {folder} is not a reward model, {REWARD_HEAD_FILE} is missing there")
        elif shown is not None:
            found += [f"--reward_pretrain: {problem}" for problem in sight_problems(folder, config, shown)]
    except ConfigError as error:
        found += [f"--reward_pretrain: {problem}" for problem in error.problems]
    return found
