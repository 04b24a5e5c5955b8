"""Checks of the learner and the replay of `cli/train_sac_vla.py` that need no environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from rlvla.commands.off_policy.flags import SACRun
from rlvla.replay.priorities import REPLAY_PRIORITIES
from rlvla.rewards import RewardConfig
from rlvla.rewards.base import REWARDS, component_of, parse_rewards, source_of
from rlvla.rewards.vlm.questions import question_named
from rlvla.trainer.off_policy.config import ASKED_AGAIN, DSRL
from rlvla.utils.cli.flags import no_effect
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.errors import ConfigError, Problem


def learner_problems(flags: SACRun) -> list[Problem]:
    """Settings of the learner and of the replay that contradict each other."""
    return [
        *_number_problems(flags),
        *_score_problems(flags),
        *_rescore_problems(flags),
        *_hindsight_problems(flags),
        *_demo_share_problems(flags),
    ]


def _number_problems(flags: SACRun) -> Iterator[Problem]:
    sac, strategy = flags.sac, flags.strategy
    assert sac.n_critics is not None  # see `SACRun.completed`
    if sac.target_critics > sac.n_critics:
        text = f"--target_critics {sac.target_critics} of --n_critics {sac.n_critics}: there are not so many"
        yield Problem("target_critics", "out_of_range", text)
    if sac.target_entropy is not None and not sac.temperature_learning_rate and "target_entropy" in flags.given:
        yield no_effect("target_entropy", sac.target_entropy, "--temperature_learning_rate is 0")
    if flags.schedule.save_value_network:
        text = "--save_value_network: the critics of this learner are of no use to another; leave it out"
        yield Problem("save_value_network", "unavailable", text)
    if flags.rollout.cuda_graphs:
        yield Problem(
            "cuda_graphs", "unavailable", "--cuda_graphs: the policies of this learner decide without; leave it out"
        )
    for name in (name for name, used in (("zero_stage", strategy.zero_stage == 3), ("bf16", strategy.bf16)) if used):
        text = f"--{name}: the networks of this learner are small, and need neither sharding nor half precision"
        yield Problem(name, "unavailable", f"{text}; leave it out")


def _score_problems(flags: SACRun) -> Iterator[Problem]:
    """Priorities that lack scores, and judges that cannot give them."""
    priority, source, rewards = flags.replay.replay_priority, flags.replay.replay_score_source, flags.rewards
    if source is None:
        if REPLAY_PRIORITIES.attribute(priority, "needs_scores"):
            text = f"--replay_priority {priority} needs --replay_score_source, whose scores count"
            yield Problem("replay_score_source", "needs_flag", text)
        return
    known = [name for name in REWARDS.names() if REWARDS.attribute(name, "scores_decisions")]
    judges = [name for name in map(component_of, rewards.reward) if source_of(name)[0] in known]
    if source not in judges and REPLAY_PRIORITIES.attribute(priority, "reads_scores"):
        text = (
            f"--replay_score_source {source}: must be a source of --reward that scores every decision "
            f"({', '.join(known)}); yours: {', '.join(judges) or 'none'}. One with weight 0 only scores, e.g. rm:0"
        )
        yield Problem("replay_score_source", "unknown_name", text)
    at_the_end = {
        "rm": rewards.rm_propositions != RewardConfig.rm_propositions and "--rm_propositions vlm",
        "rm_model": rewards.rm_model_pay == "final" and "--rm_model_pay final",
        "vlm": not question_named(rewards.vlm_scorer).measures_progress and f"--vlm_scorer {rewards.vlm_scorer}",
    }
    if why := at_the_end.get(source):
        text = f"--replay_score_source {source}: with {why} it does not score single decisions"
        yield Problem("replay_score_source", "contradiction", text)


def _rescore_problems(flags: SACRun) -> Iterator[Problem]:
    """Scores that cannot change, or images that are not kept."""
    source, flag = flags.replay.replay_score_source, "replay_rescore_interval"
    if not flags.replay.replay_rescore_interval:
        return
    if source is None or source_of(source)[0] != ASKED_AGAIN:
        text = f"--{flag}: only a model on a server may change its answer; give --replay_score_source {ASKED_AGAIN}"
        yield Problem(flag, "needs_flag", text)
    if not flags.sac.read_images:
        text = f"--{flag}: no images are kept that could be shown to the judge again; give --read_images"
        yield Problem(flag, "needs_flag", text)


def _hindsight_problems(flags: SACRun) -> Iterator[Problem]:
    """Settings that hindsight relabeling cannot work with."""
    replay = flags.replay
    if not replay.her_ratio:
        return
    if flags.sac.policy == DSRL:
        text = "--her_ratio: --policy dsrl sees what its flow policy sees, which knows no goals; leave it out"
        yield Problem("her_ratio", "unavailable", text)
    elif flags.rewards.rm_state_input != "proprio":
        text = "--her_ratio: the goals are states of a reward machine; give --reward rm and --rm_state_input proprio"
        yield Problem("her_ratio", "needs_flag", text)
    if replay.demos is not None:
        text = "--her_ratio: which states of the machine demonstrations reach is not known; leave --demos out"
        yield Problem("her_ratio", "contradiction", text)
    if replay.her_goal == "final" and replay.her_ratio > 1:
        text = f"--her_ratio {replay.her_ratio:g}: with --her_goal final all copies are the same; give at most 1"
        yield Problem("her_ratio", "out_of_range", text)
    with suppress(ConfigError):  # reported with the rewards
        weights = parse_rewards(flags.rewards.reward)
        if not weights.get("success") and not weights.get("rm"):
            text = "--her_ratio: neither success nor rm pays, so that no goal would; give one of them a weight"
            yield Problem("her_ratio", "contradiction", text)


def _demo_share_problems(flags: SACRun) -> Iterator[Problem]:
    """A batch of which a rank sees no demonstration, or nothing else."""
    share, size, ranks = flags.replay.demo_share, flags.batch.train_batch_size, launched_world_size()
    if flags.replay.demos is not None and not 0 < round(size * share / ranks) < size // ranks:
        text = f"--demo_share {share} of --train_batch_size {size}: both parts need a decision on each rank"
        yield Problem("demo_share", "out_of_range", text)
