"""Checks of the learner and the replay of `cli/train_sac_vla.py` that need no environment."""

from __future__ import annotations

from contextlib import suppress

from rlvla.commands.off_policy.flags import SACRun
from rlvla.rewards import RewardConfig
from rlvla.rewards.base import component_of, parse_rewards, source_of
from rlvla.rewards.vlm.questions import question_named
from rlvla.trainer.off_policy.config import ASKED_AGAIN, DSRL
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.deepspeed.config import launched_world_size
from rlvla.utils.errors import ConfigError, Problem

_JUDGES = ("rm", "rm_model", "vlm")  # reward sources that say how far an episode has come
_WITHOUT_SCORES, _WITH_SCORES = ("uniform", "td"), ("vlm", "hybrid")  # others are one's own, and read what they like
_HYBRID_FLAGS = ("replay_combine", "replay_vlm_weight", "replay_td_weight")
_PRIORITY_FLAGS = (
    *("replay_alpha", "replay_max_td_error", "replay_eps", "replay_beta", "replay_share", "replay_weights"),
    *("replay_max_is_weight", "replay_stratified", *_HYBRID_FLAGS),
)


def learner_problems(flags: SACRun) -> list[Problem]:
    """Settings of the learner and of the replay that contradict each other."""
    return [
        *_number_problems(flags),
        *_score_problems(flags),
        *_unread_by_priority(flags),
        *_rescore_problems(flags),
        *_silent_judge_problems(flags),
        *_unread_by_learner(flags),
        *_hindsight_problems(flags),
        *_demo_share_problems(flags),
        *_strategy_problems(flags),
    ]


def _number_problems(flags: SACRun) -> list[Problem]:
    sac, replay, found = flags.sac, flags.replay, []
    if sac.target_critics > sac.n_critics:
        text = f"--target_critics {sac.target_critics} of --n_critics {sac.n_critics}: there are not so many"
        found.append(Problem("target_critics", "out_of_range", text))
    if replay.replay_vlm_weight == replay.replay_td_weight == 0:
        text = "--replay_vlm_weight and --replay_td_weight are both 0; one of them must be positive"
        return [*found, Problem("replay_vlm_weight", "out_of_range", text)]
    try:
        _ = replay.priority_settings
    except ValueError as error:
        found.append(Problem("replay_alpha", "out_of_range", f"--replay_alpha: {error}"))
    return found


def _score_problems(flags: SACRun) -> list[Problem]:
    """Scores that the priorities need and do not have, or have and do not need."""
    priority, source, flag = flags.replay.replay_priority, flags.replay.replay_score_source, "replay_score_source"
    if priority in _WITHOUT_SCORES:
        text = f"--replay_score_source: --replay_priority {priority} reads no scores; leave it out"
        return [] if source is None else [Problem(flag, "no_effect", text)]
    if source is None and priority not in _WITH_SCORES:
        return []  # one's own may do without
    if source is None:
        text = f"--replay_priority {priority} needs --replay_score_source, whose scores count"
        return [Problem(flag, "needs_flag", text)]
    judges = [name for name in map(component_of, flags.rewards.reward) if source_of(name)[0] in _JUDGES]
    text = (
        f"--replay_score_source {source}: must be a source of --reward that judges on the way ({', '.join(_JUDGES)}); "
        f"yours: {', '.join(judges) or 'none'}. One with weight 0 only scores, e.g. rm:0"
    )
    return [] if source in judges else [Problem(flag, "unknown_name", text)]


def _unread_by_priority(flags: SACRun) -> list[Problem]:
    priority, found = flags.replay.replay_priority, []
    if flags.replay.replay_refresh_interval and priority == "uniform":
        text = "--replay_refresh_interval: --replay_priority uniform reads no TD errors; leave it out"
        found.append(Problem("replay_refresh_interval", "no_effect", text))
    unread = {"uniform": _PRIORITY_FLAGS, "td": _HYBRID_FLAGS, "vlm": _HYBRID_FLAGS}.get(priority, ())
    for name in (name for name in unread if name in flags.given):
        typed = as_typed(name, getattr(flags.replay, name))
        text = f"{typed}: --replay_priority {priority} does not read it; leave it out"
        found.append(Problem(name, "no_effect", text))
    return found


def _rescore_problems(flags: SACRun) -> list[Problem]:
    """Scores that would be the same again, or pictures that are not kept."""
    source, flag, found = flags.replay.replay_score_source, "replay_rescore_interval", []
    if not flags.replay.replay_rescore_interval:
        return []
    if source is None or source_of(source)[0] != ASKED_AGAIN:
        text = f"--{flag}: only a model on a server may change its answer; give --replay_score_source {ASKED_AGAIN}"
        found.append(Problem(flag, "needs_flag", text))
    if not flags.sac.read_images:
        text = f"--{flag}: no images are kept that could be shown to the judge again; give --read_images"
        found.append(Problem(flag, "needs_flag", text))
    return found


def _silent_judge_problems(flags: SACRun) -> list[Problem]:
    """A judge whose settings make it wait for the end of an episode."""
    rewards, source = flags.rewards, flags.replay.replay_score_source
    silent = {
        "rm": rewards.rm_propositions != RewardConfig.rm_propositions and "--rm_propositions vlm",
        "rm_model": rewards.rm_model_pay == "final" and "--rm_model_pay final",
        "vlm": not question_named(rewards.vlm_scorer).measures_progress and f"--vlm_scorer {rewards.vlm_scorer}",
    }
    why = silent.get(source or "")
    text = f"--replay_score_source {source}: with {why} it says nothing of single decisions"
    return [Problem("replay_score_source", "contradiction", text)] if why else []


def _unread_by_learner(flags: SACRun) -> list[Problem]:
    sac, replay, found = flags.sac, flags.replay, []
    if flags.schedule.save_value_network:
        text = "--save_value_network: the critics of this learner are of no use to another; leave it out"
        found.append(Problem("save_value_network", "unavailable", text))
    unread = {
        "choice_exploration": sac.policy != "primitives" and f"--policy {sac.policy}",
        "primitive_target_entropy": sac.policy != "primitives" and f"--policy {sac.policy}",
        "replay_max_is_weight": replay.replay_weights != "clip" and f"--replay_weights {replay.replay_weights}",
        "replay_rescore_budget": not replay.replay_rescore_interval and "--replay_rescore_interval 0",
        "replay_refresh_budget": not replay.replay_refresh_interval and "--replay_refresh_interval 0",
        "critic_state": sac.critic_state and not sac.read_images and "a policy without --read_images",
        "image_shift": not sac.read_images and "a policy without --read_images",
        "target_entropy": not sac.temperature_learning_rate and "--temperature_learning_rate 0",
    }
    return found + [
        Problem(name, "no_effect", f"--{name}: {reader} does not read it; leave it out")
        for name, reader in unread.items()
        if reader and name in flags.given
    ]


def _hindsight_problems(flags: SACRun) -> list[Problem]:
    """What hindsight needs and does not have."""
    replay, found = flags.replay, []
    if not replay.her_ratio:
        text = "--her_goal: --her_ratio 0 stores no episode with another goal; leave it out"
        return [Problem("her_goal", "no_effect", text)] if "her_goal" in flags.given else []
    if flags.sac.policy == DSRL:
        text = "--her_ratio: --policy dsrl sees what its flow policy sees, which knows no goals; leave it out"
        found.append(Problem("her_ratio", "unavailable", text))
    elif flags.rewards.rm_state_input != "proprio":
        text = "--her_ratio: the goals are states of a reward machine; give --reward rm and --rm_state_input proprio"
        found.append(Problem("her_ratio", "needs_flag", text))
    if replay.demos is not None:
        text = "--her_ratio: which states of the machine demonstrations reach is not known; leave --demos out"
        found.append(Problem("her_ratio", "contradiction", text))
    if replay.her_goal == "final" and replay.her_ratio > 1:
        text = f"--her_ratio {replay.her_ratio:g}: with --her_goal final all copies are the same; give at most 1"
        found.append(Problem("her_ratio", "out_of_range", text))
    with suppress(ConfigError):  # reported with the rewards
        weights = parse_rewards(flags.rewards.reward)
        if not weights.get("success") and not weights.get("rm"):
            text = "--her_ratio: neither success nor rm pays, so that no goal would; give one of them a weight"
            found.append(Problem("her_ratio", "contradiction", text))
    return found


def _demo_share_problems(flags: SACRun) -> list[Problem]:
    """A batch of which a rank sees no demonstration, or nothing else."""
    share, size, ranks = flags.replay.demo_share, flags.batch.train_batch_size, launched_world_size()
    if flags.replay.demos is None:
        text = "--demo_share: there are no --demos"
        return [Problem("demo_share", "needs_flag", text)] if "demo_share" in flags.given else []
    text = f"--demo_share {share} of --train_batch_size {size}: both parts need a decision on each rank"
    fits = 0 < round(size * share / ranks) < size // ranks
    return [] if fits else [Problem("demo_share", "out_of_range", text)]


def _strategy_problems(flags: SACRun) -> list[Problem]:
    text = "the networks of this learner are small, and need neither sharding nor half precision; leave it out"
    unavailable = {"zero_stage": flags.strategy.zero_stage == 3, "bf16": flags.strategy.bf16}
    return [Problem(name, "unavailable", f"--{name}: {text}") for name, given in unavailable.items() if given]
