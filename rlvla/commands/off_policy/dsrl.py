"""Checks of `--policy dsrl`: the flow policy whose noise is chosen decides environment, chunk and observations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlvla.checkpoints.policy_folder import recorded_environment
from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.commands.off_policy.flags import SACRun
from rlvla.commands.run_policies import is_run_folder, policy_folder
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.models.config import PolicyConfig
from rlvla.models.dsrl.family import new_dsrl
from rlvla.trainer.off_policy.config import DSRL
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem


def with_base_folder(flags: SACRun) -> SACRun:
    """The flags with the `policy_folder` of --pretrain; a resumed run keeps its initial one.

    Raises:
        ConfigError: as in `policy_folder`.
    """
    typed = flags.noise.pretrain
    if flags.sac.policy != DSRL or typed is None or not is_run_folder(Path(typed)):
        return flags
    record, started = Path(flags.run.save_path) / RUN_FILE, None
    if flags.run.load_checkpoint and record.is_file():
        started = read_json(record, allow_nan=True).get("noise", {}).get("pretrain")
    kept = started is not None and Path(started).is_relative_to(typed)
    return replace(
        flags,
        noise=replace(flags.noise, pretrain=started if kept else policy_folder(typed, env_python=flags.env.env_python)),
    )


def noise_problems(flags: SACRun) -> list[Problem]:
    """Flags that `--policy dsrl` needs or does not read."""
    noise, problems = flags.noise, list[Problem]()
    if flags.sac.policy != DSRL:
        return []
    if noise.pretrain is None:
        text = "--policy dsrl needs --pretrain, the folder of the flow policy whose noise it chooses"
        problems.append(Problem("pretrain", "needs_flag", text))
    if flags.sac.read_images:
        text = "--read_images: --policy dsrl sees what its flow policy sees; leave it out"
        problems.append(Problem("read_images", "no_effect", text))
    if flags.replay.demos is not None:
        text = "--demos: demonstrations hold actions, not the noise that --policy dsrl chooses; leave it out"
        problems.append(Problem("demos", "contradiction", text))
    return problems


def check_base(flags: SACRun) -> tuple[CheckedRun | None, list[Problem]]:
    """The run with an actor over the noise of `--pretrain`, or None and all problems."""
    folder = flags.noise.pretrain
    assert folder is not None
    settings = flags.noise.of_the_base | {"action_chunk_len": flags.sac.action_chunk_len}
    with suppress(ConfigError):  # reported below
        if flags.env.completed(recorded_environment(folder)).tasks()[0].primitives:
            text = "--policy dsrl: the environment takes action primitives, its flow policy gives actions"
            return None, [Problem("policy", "mismatch", f"{text}; take --policy primitives")]
    run, problems = check_run(
        PolicyConfig(**settings),
        flags.env,
        flags.split,
        flags.schedule.eval_episodes,
        rewards=flags.rewards,
        success=flags.success,
    )
    if run is None:
        return None, problems
    try:
        actor = new_dsrl(
            Path(flags.run.save_path) / "policy",
            run.checkpoint,
            hidden_sizes=flags.sac.hidden_sizes,
            noise_range=flags.noise.noise_range,
            repeat_noise=flags.noise.repeat_noise,
            base_settings=settings | {"cameras": run.env.camera_names},
        )
    except ConfigError as error:
        return None, error.problems
    return replace(run, checkpoint=actor), []
