"""The settings of the algorithm: advantages, losses, KL, filters, rollout correction. Each field is a flag."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.algorithms.advantages import advantage_estimator_options, list_advantage_estimators
from rlvla.algorithms.choices import (
    AGGREGATION_MODES,
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    KL_KINDS,
    REJECTION_STATISTICS,
)
from rlvla.algorithms.policy_losses import list_policy_losses, policy_loss_options, policy_loss_scores
from rlvla.algorithms.registry import Registry
from rlvla.utils.cli.flags import arg

# Algorithms by name, for --algorithm; a --custom_module may register more (see `rlvla.trainer.algorithm`).
LEARNERS: Registry = Registry(
    "algorithm", {"rlvla.trainer.ppo_trainer": ("ppo",), "rlvla.trainer.nft_trainer": ("nft",)}
)
AUTO = "auto"
NFT_REWARDS = ("advantage", "success")
LEVELS = ("token", "action", "chunk")
# `Algorithm.scores` of learners that train with any policy loss.
OF_POLICY_LOSS = "policy_loss"
KL_ESTIMATORS = (*KL_KINDS, *(f"{kind}+" for kind in KL_KINDS if kind != "full"))
# Estimators with a single advantage per episode, regardless of the advantage level.
ONE_ADVANTAGE_PER_EPISODE = {"gdpo", "gpg", "grpo", "grpo_passk", "opo", "reinforce_baseline", "rloo"}


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, losses and penalties.

    `needs_critic` is what the flags ask for; whether the learner has these networks at all, `learner_needs_critic` and
    `learner_needs_reference` say.
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
    gamma: float = arg(1.0, "discount per column of the advantage level (not in group methods)", minimum=0, maximum=1)
    lambd: float = arg(
        1.0, "lambda of gae", minimum=0, maximum=1, of=("advantage estimator", "gae"), aliases=("lam", "gae_lambda")
    )
    advantage_level: str = arg(
        "action",
        "unit with one advantage: an action token, an action, or a chunk (methods that score whole episodes use the "
        "same advantage throughout an episode)",
        choices=LEVELS,
    )
    log_prob_level: str = arg("token", "unit over which log-probs are summed before taking the ratio", choices=LEVELS)
    bootstrap_truncated: bool = arg(
        True,
        "bootstrap an episode truncated by the step limit with the critic's value of its last observation; off: "
        "treat it as terminated, so that only what is reached within --max_steps counts, as in an evaluation",
        of=("advantage estimator", "gae"),
    )
    norm_adv_by_std: bool = arg(
        True,
        "grpo, grpo_passk, gdpo: divide by the standard deviation of the group (off with grpo: Dr. GRPO)",
        of=("advantage estimator", "gdpo", "grpo", "grpo_passk"),
        aliases=("norm_adv_by_std_in_grpo",),
    )
    whiten_per_task: bool = arg(
        False,
        "whiten the advantages of each task by themselves: all tasks weigh alike, however their rewards and successes "
        "are spread",
    )
    singleton: str = arg(
        "raw",
        "rloo with --n_samples_per_prompt 1: the advantage is the score (raw) or 0",
        choices=("raw", "zero"),
        of=("advantage estimator", "rloo"),
    )
    f_norm: float = arg(1.0, "gpg estimator: divisor of the advantages", above=0, of=("advantage estimator", "gpg"))
    handle_zero_tail: bool = arg(
        True,
        "no baseline at steps that only one episode of the group reaches",
        of=("advantage estimator", "optimal_token_baseline"),
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
    )
    policy_loss: str = arg(
        "ppo", "policy loss", choices=list_policy_losses, essential=True, aliases=("policy_loss_type",)
    )
    eps_clip: float = arg(
        0.2,
        "the ratio is clipped to 1 +- this (typically 3e-4 to 0.05 for gspo, 0.4 for geo_mean)",
        above=0,
        aliases=("clip_ratio", "cliprange", "epsilon"),
    )
    eps_clip_low_high: tuple[float, ...] = arg(
        (), "two clip widths instead of --eps_clip: below and above 1, e.g. 0.2 0.28", above=0, metavar="EPS"
    )
    eps_clip_dual: float | None = arg(
        None,
        "ppo: bound of the ratio for negative advantages (off by default); dppo: largest ratio (20)",
        above=1,
        of=("policy loss", "dppo", "dppo_kl", "dppo_tv", "ppo"),
        aliases=("dual_clip", "clip_ratio_c"),
    )
    tau_pos: float = arg(1.0, "steepness of the gate for positive advantages", above=0, of=("policy loss", "sapo"))
    tau_neg: float = arg(1.05, "steepness of the gate for the other advantages", above=0, of=("policy loss", "sapo"))
    beta: float = arg(0.1, "weight of the squared log-ratio", minimum=0, of=("policy loss", "dro"))
    cov_ratio: float = arg(
        2e-4,
        "clip_cov, kl_cov: fraction of the tokens of a step that is selected, at least one",
        above=0,
        maximum=1,
        of=("policy loss", "clip_cov", "kl_cov"),
    )
    cov_low: float = arg(1.0, "smallest covariance of a selected token", of=("policy loss", "clip_cov"))
    cov_high: float = arg(5.0, "largest covariance of a selected token", of=("policy loss", "clip_cov"))
    kl_cov_coef: float = arg(1.0, "weight of the penalty |log-ratio|", minimum=0, of=("policy loss", "kl_cov"))
    denoising_gamma: float = arg(
        0.99,
        "factor on the advantage for each denoising step before the last",
        minimum=0,
        maximum=1,
        of=("policy loss", "dppo"),
    )
    denoising_clip: tuple[float, ...] = arg(
        (0.001, 0.01),
        "clip widths of the ratio at the first and at the last denoising step",
        above=0,
        nargs=2,
        metavar="EPS",
        of=("policy loss", "dppo"),
    )
    fpo_clip: float = arg(0.05, "the ratio is clipped to 1 +- this", above=0, of=("policy loss", "fpo"))
    nft_beta: float = arg(1.0, "scale of the change that is mirrored for failures", above=0, of=("algorithm", "nft"))
    nft_reward: str = arg(
        "advantage",
        "what says how good an action was: the advantage, clipped to --nft_clip, or success of the episode",
        choices=NFT_REWARDS,
        of=("algorithm", "nft"),
    )
    nft_clip: float = arg(1.0, "advantages are clipped to this on both sides", above=0, of=("algorithm", "nft"))
    nft_rollout_decay: float = arg(
        0.5,
        "decay per iteration of the moving average of the weights, which plays, is evaluated and saved",
        minimum=0,
        below=1,
        of=("algorithm", "nft"),
    )
    value_clip: float = arg(
        0.2,
        "clip the critic's change from its old values to this; 0: no clipping",
        minimum=0,
        of=("advantage estimator", "gae"),
        aliases=("cliprange_value",),
    )
    normalize_values: bool = arg(
        False,
        "train the critic on returns normalized by their running mean and standard deviation",
        of=("advantage estimator", "gae"),
    )
    share_backbone: bool = arg(
        False,
        "the critic is a value head on the actor's backbone instead of a separate network",
        of=("advantage estimator", "gae"),
    )
    vf_coef: float = arg(
        0.5, "--share_backbone: weight of the value loss in the joint loss", above=0, of=("advantage estimator", "gae")
    )
    loss_agg_mode: str = arg(
        "token-mean",
        "how token losses are aggregated (gspo, sapo and geo_mean have a fixed mode for the policy loss; this one "
        "still applies to entropy, KL and value loss)",
        choices=AGGREGATION_MODES,
    )
    loss_horizon: float | None = arg(
        None, "divisor of --loss_agg_mode seq-mean-token-sum-norm (default: the columns of a decision)", above=0
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
    )
    use_kl_in_reward: bool | None = arg(
        None, "subtract the KL from the reward (default: on, unless --use_kl_loss; both at once is an error)"
    )
    use_kl_loss: bool = arg(False, "add the KL to the loss instead of subtracting it from the reward")
    kl_target: float | None = arg(
        None, "adapt the KL weight to reach this KL per token (default: constant weight)", above=0
    )
    kl_horizon: int = arg(10000, "horizon of --kl_target in episodes", minimum=1)

    @property
    def clip(self) -> tuple[float, float]:
        """The clip widths (low, high) of the ratio."""
        low, high = self.eps_clip_low_high or (self.eps_clip, self.eps_clip)
        return low, high

    @property
    def reward_clip(self) -> tuple[float, float] | None:
        """The range (low, high) of a step's reward, or None."""
        return (self.reward_clip_range[0], self.reward_clip_range[1]) if self.reward_clip_range else None

    @property
    def estimator_options(self) -> frozenset[str]:
        """Names of the arguments of the advantage estimator."""
        return advantage_estimator_options(self.advantage_estimator)

    @property
    def loss_options(self) -> frozenset[str]:
        """Names of the arguments of the policy loss."""
        return policy_loss_options(self.policy_loss)

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator uses values."""
        return "values" in self.estimator_options

    @property
    def needs_greedy_episodes(self) -> bool:
        """Whether each group is compared with a greedy episode from the same state."""
        return "reward_baselines" in self.estimator_options

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
    return policy_loss_scores(algorithm.policy_loss) if scores == OF_POLICY_LOSS else scores


def learner_needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the run has a critic: the estimator uses values and the learner trains one; imports the learner."""
    return algorithm.needs_critic and bool(LEARNERS.get(algorithm.algorithm).uses_critic)


def learner_needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether the run has a reference: the KL has a weight and the learner uses it; imports the learner."""
    return bool(algorithm.init_kl_coef and LEARNERS.get(algorithm.algorithm).uses_reference)


@dataclass(frozen=True)
class FilterConfig:
    """Filters of dynamic sampling: groups are played until enough of them have been kept."""

    filter_accuracy: bool = arg(False, "keep groups whose mean success lies within the accuracy bounds")
    accuracy_lower_bound: float = arg(0.1, "lower bound of --filter_accuracy, inclusive", minimum=0, maximum=1)
    accuracy_upper_bound: float = arg(0.9, "upper bound of --filter_accuracy, inclusive", minimum=0, maximum=1)
    filter_zero_variance: bool = arg(False, "drop groups whose episodes all have the same score")
    filter_metric: str | None = arg(
        None,
        "keep groups whose mean of this number lies within --filter_metric_range: score (the whole reward), a reward "
        "source, a number that a source reports (reward_fn_speed), success_once, success_at_end, episode_length or "
        "regressions",
        metavar="NAME",
    )
    filter_metric_range: tuple[float, ...] = arg((), "bounds of --filter_metric, inclusive", metavar="LOW HIGH")
    filter_truncated: bool = arg(False, "drop groups with an episode truncated by the step limit")
    oversample_factor: float = arg(1.0, "number of groups to start per group still needed", minimum=1)
    max_group_staleness: int = arg(
        0, "keep surplus groups for up to this many further iterations; 0: drop them", minimum=0
    )
    max_rollout_rounds: int = arg(
        4, "maximum number of rounds per iteration; after that, train on the groups kept so far", minimum=1
    )

    @property
    def active(self) -> bool:
        """Whether any filter is on."""
        switches = (self.filter_accuracy, self.filter_zero_variance, self.filter_truncated)
        return any(switches) or self.filter_metric is not None


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
        "token", "weights per column of --log_prob_level, or per decision", choices=CORRECTION_LEVELS
    )
    rollout_is_low: float = arg(0.0, "lower bound of the weights", minimum=0)
    rollout_is_high: float = arg(2.0, "upper bound of the weights", above=0)
    rollout_is_batch_normalize: bool = arg(False, "divide the weights by their mean")
    rollout_rs: str = arg(
        "none",
        "rejection: statistic of the divergence by which entries outside the bounds are masked",
        choices=("none", *REJECTION_STATISTICS),
    )
    rollout_rs_level: str = arg("sequence", "reject single columns or whole decisions", choices=CORRECTION_LEVELS)
    rollout_rs_low: float = arg(0.0, "smallest statistic to keep", minimum=0)
    rollout_rs_high: float = arg(0.01, "largest statistic to keep", minimum=0)

    @property
    def weighs(self) -> bool:
        """Whether there are importance weights."""
        return self.rollout_is in CORRECTION_MODES
