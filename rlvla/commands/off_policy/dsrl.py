"""Checks of `--policy dsrl`: the flow policy whose noise is chosen decides environment, chunk and observations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from rlvla.checkpoints.policy_folder import recorded_environment
from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.commands.off_policy.flags import SACRun
from rlvla.commands.run_policies import is_run_folder, policy_folder
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.models.config import PolicyConfig
from rlvla.models.dsrl.family import new_dsrl
from rlvla.trainer.off_policy.config import DSRL
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem


def with_base_folder(flags: SACRun) -> SACRun:
    """The flags with the `policy_folder` of --pretrain; a resumed run keeps what it started from.

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
    return replace(flags, noise=replace(flags.noise, pretrain=started if kept else policy_folder(typed)))


def noise_problems(flags: SACRun) -> list[Problem]:
    """Flags that `--policy dsrl` needs, or does not read, and those that only it reads."""
    noise, found = flags.noise, []
    if flags.sac.policy != DSRL:
        for field in fields(noise):
            value = getattr(noise, field.name)
            if value != field.default:
                text = f"{as_typed(field.name, value)}: --policy {flags.sac.policy} has no flow policy; leave it out"
                found.append(Problem(field.name, "no_effect", text))
        return found
    if noise.pretrain is None:
        text = "--policy dsrl needs --pretrain, the folder of the flow policy whose noise it chooses"
        found.append(Problem("pretrain", "needs_flag", text))
    if flags.sac.read_images:
        text = "--read_images: --policy dsrl sees what its flow policy sees; leave it out"
        found.append(Problem("read_images", "no_effect", text))
    if flags.replay.demos is not None:
        text = "--demos: demonstrations hold actions, not the noise that --policy dsrl chooses; leave it out"
        found.append(Problem("demos", "contradiction", text))
    return found


def check_base(flags: SACRun) -> tuple[CheckedRun | None, list[Problem]]:
    """The run with an actor over the noise of `--pretrain`, or None and all problems."""
    folder = flags.noise.pretrain
    assert folder is not None
    settings = flags.noise.of_the_base | {"action_chunk_len": flags.sac.action_chunk_len}
    with suppress(ConfigError):  # reported below
        if flags.env.completed(recorded_environment(folder)).tasks()[0].primitives:
            text = "--policy dsrl: the environment takes action primitives, its flow policy gives actions"
            return None, [Problem("policy", "mismatch", f"{text}; take --policy primitives")]
    parts = (flags.env, flags.split, flags.schedule.eval_episodes, flags.rewards, flags.success)
    run, found = check_run(PolicyConfig(**settings), *parts)
    if run is None:
        return None, found
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
