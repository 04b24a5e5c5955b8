"""The settings of the algorithm: advantages, losses, KL, filters, rollout correction. Each field is a flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvla.algorithms.advantages import ADVANTAGE_ESTIMATORS, list_advantage_estimators
from rlvla.algorithms.choices import (
    AGGREGATION_MODES,
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    KL_KINDS,
    REJECTION_STATISTICS,
)
from rlvla.algorithms.policy_losses import POLICY_LOSSES, list_policy_losses
from rlvla.options import (
    Condition,
    Options,
    Registry,
    arg,
    equals,
    fill_selected,
    from_values,
    given,
    selected,
    switched_on,
)

AUTO = "auto"
NFT_REWARDS = ("advantage", "success")
LEVELS = ("token", "action", "chunk")
# `Algorithm.scores` of learners that train with any policy loss.
OF_POLICY_LOSS = "policy_loss"
KL_ESTIMATORS = (*KL_KINDS, *(f"{kind}+" for kind in KL_KINDS if kind != "full"))


@dataclass(frozen=True)
class NFTOptions(Options):
    """Options of `--algorithm nft`."""

    nft_beta: float = arg(1.0, "scale of the change that is mirrored for failures", above=0)
    nft_reward: str = arg(
        "advantage",
        "measure of an action's quality: the advantage, clipped to --nft_clip, or success of the episode",
        choices=NFT_REWARDS,
    )
    nft_clip: float = arg(
        1.0, "advantages are clipped to this on both sides", above=0, read_if=equals("nft_reward", "advantage")
    )
    nft_rollout_decay: float = arg(
        0.5,
        "decay per iteration of the moving average of the weights, which plays, is evaluated and saved",
        minimum=0,
        below=1,
    )


# Algorithms by name, for --algorithm; a --custom_module may register more (see `rlvla.trainer.algorithm`).
LEARNERS: Registry = Registry(
    "algorithm",
    flag="algorithm",
    modules={"rlvla.trainer.ppo_trainer": ("ppo",), "rlvla.trainer.nft_trainer": ("nft",)},
    declared={"nft": NFTOptions},
)


def _estimator_reads(
    parameter: str, otherwise: str = "--advantage_estimator {advantage_estimator} does not use it"
) -> Condition:
    """The advantage estimator has this parameter; true where a command has no estimators."""

    def holds(flags: Mapping[str, Any]) -> bool:
        name = flags.get("advantage_estimator")
        return name is None or parameter in ADVANTAGE_ESTIMATORS.parameters(name)

    return Condition(holds, otherwise)


WITH_CRITIC = _estimator_reads("values", "{advantage_estimator} has no critic")
WITH_SEPARATE_CRITIC = (
    WITH_CRITIC,
    Condition(lambda flags: not flags.get("share_backbone"), "--share_backbone trains one network"),
)
OBSERVATION, STATE = "observation", "state"  # inputs of a separate critic
WITH_CRITIC_ON_OBSERVATIONS = (
    *WITH_SEPARATE_CRITIC,
    Condition(
        lambda flags: flags.get("critic_input") != STATE,
        "--critic_input state trains a new network, which is not exported",
    ),
)
_WITH_KL = Condition(lambda flags: bool(flags["init_kl_coef"]), "there is no KL with --init_kl_coef 0")


def _aggregates_losses(flags: Mapping[str, Any]) -> bool:
    """Whether any loss is aggregated by --loss_agg_mode."""
    return (
        "agg_mode" in POLICY_LOSSES.parameters(flags["policy_loss"])
        or WITH_CRITIC.holds(flags)
        or bool(flags["entropy_loss_coef"])
        or bool(flags["init_kl_coef"] and flags["use_kl_loss"])
    )


def _compares_columns(flags: Mapping[str, Any]) -> bool:
    """Whether the loss has a ratio for each column of a decision rather than one for the decision."""
    scores = LEARNERS.get(flags["algorithm"]).scores
    if scores == OF_POLICY_LOSS:
        scores = POLICY_LOSSES.attribute(flags["policy_loss"], "scores")
    return flags["algorithm"] == "nft" or scores in (None, "log_probs")


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, losses and penalties.

    `needs_critic` follows from the flags alone; `learner_needs_critic` and `learner_needs_reference` also ask whether
    the learner has these networks.

    Attributes:
        estimator_options: options of the advantage estimator.
        loss_options: options of the policy loss.
        learner_options: options of the algorithm.
    """

    algorithm: str = arg(
        "ppo",
        "learning algorithm: ppo, with any advantage estimator and policy loss; nft, for flow-matching policies, with "
        "any estimator that has no critic; or one registered by a --custom_module",
        choices=LEARNERS.names,
    )
    advantage_estimator: str = arg(
        "gae",
        "advantage estimator: gae trains a critic, remax plays a greedy episode per group, most others compare the "
        "episodes of a group; reinforce does not whiten (OpenRLHF's reinforce does: here reinforce_plus_plus)",
        choices=list_advantage_estimators,
        essential=True,
        aliases=("adv_estimator",),
    )
    gamma: float = arg(
        1.0,
        "discount per column of the advantage level (not in group methods)",
        minimum=0,
        maximum=1,
        read_if=_estimator_reads("gamma"),
    )
    advantage_level: str = arg(
        "action",
        "unit with one advantage: an action token, an action, or a chunk (methods that score whole episodes use the "
        "same advantage throughout an episode)",
        choices=LEVELS,
    )
    log_prob_level: str = arg(
        "token",
        "unit over which log-probs are summed before taking the ratio",
        choices=LEVELS,
        read_if=Condition(_compares_columns, "--policy_loss {policy_loss} compares whole decisions"),
    )
    bootstrap_truncated: bool = arg(
        True,
        "bootstrap an episode truncated by the step limit with the critic's value of its last observation; off: "
        "treat it as terminated, so that only what is reached within --max_steps counts, as in an evaluation",
        of=("advantage estimator", "gae"),
        read_if=WITH_CRITIC,
    )
    whiten_per_task: bool = arg(
        False,
        "whiten the advantages of each task by themselves: all tasks weigh alike, however their rewards and successes "
        "are spread",
        read_if=Condition(lambda flags: flags.get("nft_reward") != "success", "--nft_reward success does not use it"),
    )
    normalize_reward: bool = arg(
        False,
        "divide the rewards that are trained on by the running standard deviation of the episodes' scores (logged "
        "rewards and filters are not scaled)",
    )
    reward_clip_range: tuple[float, ...] = arg(
        (),
        "clip the reward of each environment step, summed over the sources and after --normalize_reward (default: no "
        "clipping)",
        metavar="LOW HIGH",
        check=(lambda pair: len(pair) == 2 and pair[0] < pair[1], "give two bounds, low < high"),
    )
    policy_loss: str = arg(
        "ppo", "policy loss", choices=list_policy_losses, essential=True, aliases=("policy_loss_type",)
    )
    value_clip: float = arg(
        0.2,
        "clip the critic's change from its old values to this; 0: no clipping",
        minimum=0,
        of=("advantage estimator", "gae"),
        aliases=("cliprange_value",),
        read_if=WITH_CRITIC,
    )
    normalize_values: bool = arg(
        False,
        "train the critic on returns normalized by their running mean and standard deviation",
        of=("advantage estimator", "gae"),
        read_if=WITH_CRITIC,
    )
    share_backbone: bool = arg(
        False,
        "the critic is a value head on the actor's backbone instead of a separate network",
        of=("advantage estimator", "gae"),
        read_if=WITH_CRITIC,
    )
    critic_input: str = arg(
        OBSERVATION,
        "input of a separate critic: observation (as the policy, in a copy of its network) or state (a small network "
        "on the suite's privileged state and the instruction; policy and evaluations never read it)",
        choices=(OBSERVATION, STATE),
        of=("advantage estimator", "gae"),
        read_if=WITH_SEPARATE_CRITIC,
    )
    vf_coef: float = arg(
        0.5,
        "--share_backbone: weight of the value loss in the joint loss",
        above=0,
        of=("advantage estimator", "gae"),
        read_if=(WITH_CRITIC, switched_on("share_backbone")),
    )
    loss_agg_mode: str = arg(
        "token-mean",
        "how token losses are aggregated (gspo, sapo and geo_mean have a fixed mode for the policy loss; this one "
        "still applies to entropy, KL and value loss)",
        choices=AGGREGATION_MODES,
        read_if=Condition(
            _aggregates_losses, "--policy_loss {policy_loss} has a fixed mode, and there is no other loss"
        ),
    )
    loss_horizon: float | None = arg(
        None,
        "divisor of --loss_agg_mode seq-mean-token-sum-norm (default: the columns of a decision)",
        above=0,
        read_if=equals("loss_agg_mode", "seq-mean-token-sum-norm"),
    )
    entropy_loss_coef: float = arg(0.0, "weight of the entropy bonus", minimum=0, aliases=("entropy_coeff", "ent_coef"))
    init_kl_coef: float = arg(
        0.0,
        "weight of the KL to the initial policy, in the reward or (--use_kl_loss) in the loss; 0: no KL",
        minimum=0,
        essential=True,
        aliases=("kl_coef",),
    )
    kl_estimator: str = arg(
        "k3",
        "KL estimator: full computes the exact KL over all outcomes; the others estimate it from samples; with the "
        "suffix + the gradient is that of k2",
        choices=KL_ESTIMATORS,
        read_if=_WITH_KL,
    )
    use_kl_in_reward: bool | None = arg(
        None,
        "subtract the KL from the reward (default: on, unless --use_kl_loss; both at once is an error)",
        read_if=_WITH_KL,
    )
    use_kl_loss: bool = arg(False, "add the KL to the loss instead of subtracting it from the reward", read_if=_WITH_KL)
    kl_target: float | None = arg(
        None,
        "adapt the KL weight to reach this KL per token (default: constant weight)",
        above=0,
        read_if=_WITH_KL,
    )
    kl_horizon: int = arg(
        10000, "horizon of --kl_target in episodes", minimum=1, read_if=(_WITH_KL, given("kl_target"))
    )

    estimator_options: Any = selected(ADVANTAGE_ESTIMATORS)
    loss_options: Any = selected(POLICY_LOSSES)
    learner_options: Any = selected(LEARNERS)

    def __post_init__(self) -> None:
        fill_selected(self)

    @classmethod
    def from_flags(cls, **values: Any) -> AlgorithmConfig:
        """The configuration with these flags, options of the selected estimator, loss and algorithm included."""
        return from_values(cls, values)

    @property
    def reward_clip(self) -> tuple[float, float] | None:
        """The range (low, high) of a step's reward, or None."""
        return (self.reward_clip_range[0], self.reward_clip_range[1]) if self.reward_clip_range else None

    @property
    def estimator_parameters(self) -> frozenset[str]:
        """Keyword parameters of the advantage estimator; inputs it does not name are neither computed nor passed."""
        return ADVANTAGE_ESTIMATORS.parameters(self.advantage_estimator)

    @property
    def loss_parameters(self) -> frozenset[str]:
        """Keyword parameters of the policy loss; inputs it does not name are neither computed nor passed."""
        return POLICY_LOSSES.parameters(self.policy_loss)

    @property
    def one_advantage_per_episode(self) -> bool:
        """Whether all columns of an episode have the same advantage, at any advantage level."""
        return bool(ADVANTAGE_ESTIMATORS.attribute(self.advantage_estimator, "per_episode"))

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator uses values."""
        return "values" in self.estimator_parameters

    @property
    def needs_greedy_episodes(self) -> bool:
        """Whether each group is compared with a greedy episode from the same state."""
        return "reward_baselines" in self.estimator_parameters

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is subtracted from the rewards."""
        wanted = not self.use_kl_loss if self.use_kl_in_reward is None else self.use_kl_in_reward
        return self.init_kl_coef > 0 and wanted

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is part of the loss."""
        return self.init_kl_coef > 0 and self.use_kl_loss

    @property
    def exact_kl(self) -> bool:
        """Whether the KL is computed exactly, which needs the full distributions."""
        return self.init_kl_coef > 0 and self.kl_estimator == "full"


def learner_scores(algorithm: AlgorithmConfig) -> str | None:
    """The `PolicySpec.scores` that the run trains on; None: any. Imports the learner."""
    scores = LEARNERS.get(algorithm.algorithm).scores
    return POLICY_LOSSES.attribute(algorithm.policy_loss, "scores") if scores == OF_POLICY_LOSS else scores


def learner_needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the run has a critic: the estimator uses values and the learner trains one; imports the learner."""
    return algorithm.needs_critic and bool(LEARNERS.get(algorithm.algorithm).uses_critic)


def learner_needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether the run has a reference: the KL has a weight and the learner uses it; imports the learner."""
    return bool(algorithm.init_kl_coef and LEARNERS.get(algorithm.algorithm).uses_reference)


_FILTERS = ("filter_accuracy", "filter_zero_variance", "filter_truncated", "filter_metric")
_FILTERED = Condition(lambda flags: any(flags[name] for name in _FILTERS), "no filter is on")


@dataclass(frozen=True)
class FilterConfig:
    """Filters of dynamic sampling: groups are played until enough of them have been kept."""

    filter_accuracy: bool = arg(False, "keep groups whose mean success lies within the accuracy bounds")
    accuracy_lower_bound: float = arg(
        0.1,
        "lower bound of --filter_accuracy, inclusive",
        minimum=0,
        maximum=1,
        read_if=switched_on("filter_accuracy"),
        at_most="accuracy_upper_bound",
    )
    accuracy_upper_bound: float = arg(
        0.9, "upper bound of --filter_accuracy, inclusive", minimum=0, maximum=1, read_if=switched_on("filter_accuracy")
    )
    filter_zero_variance: bool = arg(False, "drop groups whose episodes all have the same score")
    filter_metric: str | None = arg(
        None,
        "keep groups whose mean of this number lies within --filter_metric_range: score (the whole reward), a reward "
        "source, a number that a source reports (reward_fn_speed), success_once, success_at_end, episode_length or "
        "regressions",
        metavar="NAME",
    )
    filter_metric_range: tuple[float, ...] = arg(
        (),
        "bounds of --filter_metric, inclusive",
        metavar="LOW HIGH",
        check=(lambda pair: len(pair) == 2 and pair[0] < pair[1], "give two bounds, low < high"),
        read_if=given("filter_metric"),
    )
    filter_truncated: bool = arg(False, "drop groups with an episode truncated by the step limit")
    oversample_factor: float = arg(
        1.0, "number of groups to start per group still needed", minimum=1, read_if=_FILTERED
    )
    max_group_staleness: int = arg(
        0,
        "keep surplus groups for up to this many further iterations; 0: drop them",
        minimum=0,
        read_if=_FILTERED,
    )
    max_rollout_rounds: int = arg(
        4,
        "maximum number of rounds per iteration; after that, train on the groups kept so far",
        minimum=1,
        read_if=_FILTERED,
    )

    @property
    def active(self) -> bool:
        """Whether any filter is on."""
        return any(getattr(self, name) for name in _FILTERS)


_WEIGHTED = equals("rollout_is", *CORRECTION_MODES)
_REJECTING = equals("rollout_rs", *REJECTION_STATISTICS)


@dataclass(frozen=True)
class CorrectionConfig:
    """Correction of the mismatch between the rollout policy and the trained policy."""

    rollout_is: str = arg(
        AUTO,
        "importance weights exp(old - rollout log-prob): tis clamps them, icepop zeroes those outside the bounds, "
        "seq_mask_tis zeroes decisions whose mean is outside the bounds; auto: icepop with bounds 0.2 and 5 if "
        "episodes are played ahead (--async_rollout), else none",
        choices=(AUTO, "none", *CORRECTION_MODES),
    )
    rollout_is_level: str = arg(
        "token",
        "weights per column of --log_prob_level, or per decision",
        choices=CORRECTION_LEVELS,
        read_if=_WEIGHTED,
    )
    rollout_is_low: float = arg(
        0.0,
        "lower bound of the weights",
        minimum=0,
        read_if=_WEIGHTED,
        at_most="rollout_is_high",
    )
    rollout_is_high: float = arg(2.0, "upper bound of the weights", above=0, read_if=_WEIGHTED)
    rollout_is_batch_normalize: bool = arg(False, "divide the weights by their mean", read_if=_WEIGHTED)
    rollout_rs: str = arg(
        "none",
        "rejection: statistic of the divergence by which entries outside the bounds are masked",
        choices=("none", *REJECTION_STATISTICS),
    )
    rollout_rs_level: str = arg(
        "sequence",
        "reject single columns or whole decisions",
        choices=CORRECTION_LEVELS,
        read_if=_REJECTING,
    )
    rollout_rs_low: float = arg(
        0.0,
        "smallest statistic to keep",
        minimum=0,
        read_if=_REJECTING,
        at_most="rollout_rs_high",
    )
    rollout_rs_high: float = arg(0.01, "largest statistic to keep", minimum=0, read_if=_REJECTING)

    @property
    def weighs(self) -> bool:
        """Whether there are importance weights."""
        return self.rollout_is in CORRECTION_MODES
