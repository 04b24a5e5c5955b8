"""The settings of off-policy training, grouped by purpose. Each field is a flag of `cli/train_sac_vla.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.choices import CRITIC_REDUCTIONS
from rlvla.data.options import dataset_camera_flag
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.models.config import CAMERA_MAP_HELP, MAX_FLOW_STEPS, PLATFORM_HELP
from rlvla.models.vla.choices import PLATFORMS
from rlvla.options import Condition, arg, equals, fill_selected, given, selected, switched_on
from rlvla.replay.priorities import REPLAY_PRIORITIES
from rlvla.rewards.base import RewardSource
from rlvla.rewards.machine_source import MachineSource
from rlvla.trainer.config import (
    BasicRunConfig,
    LoopBatchConfig,
    LoopGuardConfig,
    LoopOptimizationConfig,
    ScheduleConfig,
    TrainerConfig,
    max_bad_steps_flag,
)
from rlvla.utils.deepspeed.config import StrategyConfig

if TYPE_CHECKING:
    from rlvla.checkpoints.policy_folder import PolicyRecord

SAC_NAME = "sac"  # of the learner
DSRL, FLOW = "dsrl", "flow"
ASKED_AGAIN = "vlm"  # reward source whose scores may change when requested again
POLICIES = ("primitives", "gaussian", FLOW, DSRL)
# Defaults that depend on --policy: flag -> (dsrl, others).
DEFAULTS = {
    "action_chunk_len": (None, 1),
    "utd_ratio": (20.0, 1.0),
    "n_critics": (10, 2),
    "actor_reduction": ("mean", "min"),
    "target_entropy": (0.5, 1.0),
}
HER_GOALS = ("final", "future", "episode")
NORMALISATIONS = ("max", "clip", "none")


_DSRL, _FLOW, _PRIMITIVES = (equals("policy", name) for name in (DSRL, FLOW, "primitives"))
_UNREAD = "--replay_priority {replay_priority} does not use it"
_BY_PRIORITY = Condition(lambda flags: flags["replay_priority"] != "uniform", _UNREAD)
_BY_SCORE = Condition(
    lambda flags: REPLAY_PRIORITIES.attribute(flags["replay_priority"], "reads_scores"),
    _UNREAD,
)


@dataclass(frozen=True)
class SACRunConfig(BasicRunConfig):
    """Folders, workers and seed."""

    save_path: str = arg(
        "runs/sac",
        "run folder: policy/, replay/, metrics, TensorBoard files, learning curve",
        metavar="DIR",
        writes="folder",
        essential=True,
        aliases=("output_dir",),
    )


@dataclass(frozen=True)
class SACBatchConfig(LoopBatchConfig):
    """Numbers of episodes, and of updates per decision."""

    num_episodes: int = arg(
        2048, "total number of episodes to play", minimum=1, essential=True, aliases=("total_episodes",)
    )
    rollout_batch_size: int = arg(16, "episodes per iteration, over all ranks", minimum=1, essential=True)
    random_episodes: int = arg(
        64,
        "initial episodes with random actions, over all ranks; updates start after them, with proprio normalized by "
        "their statistics",
        minimum=0,
        read_if=Condition(
            lambda flags: not flags.get("offline_updates"), "after --offline_updates the policy plays from the start"
        ),
    )
    offline_updates: int = arg(
        0,
        "--demos: updates on them alone before the first episode (offline reinforcement learning)",
        minimum=0,
        read_if=given("demos"),
    )
    train_batch_size: int = arg(256, "decisions per update, over all ranks", minimum=2, essential=True)
    utd_ratio: float | None = arg(
        None,
        "critic updates per decision played (update-to-data ratio) (default: 1; dsrl: 20)",
        above=0,
        essential=True,
    )
    actor_interval: int = arg(1, "critic updates per update of actor and temperatures", minimum=1)

    @property
    def exploring_episodes(self) -> int:
        """Initial episodes with random actions; none after offline updates."""
        return 0 if self.offline_updates else self.random_episodes


@dataclass(frozen=True)
class SACConfig:
    """Actor, critics and temperatures of soft actor-critic."""

    policy: str = arg(
        "gaussian",
        "policy: primitives (a choice of action primitive and its parameters, where the suite offers them: "
        "robosuite with --action_space primitives), gaussian (chunks of actions), flow (chunks of actions from a "
        "flow) or dsrl (the flow policy of --pretrain, started from learned noise)",
        choices=POLICIES,
        essential=True,
    )
    action_chunk_len: int | None = arg(
        None,
        "actions per decision; dsrl: as many as --pretrain executes, but a LeRobot policy may execute fewer than it "
        "predicts (default: gaussian and flow 1)",
        minimum=1,
        maximum=1000,
        aliases=("n_action_steps",),
        essential=True,
    )
    read_images: bool = arg(
        False, "the policy sees the cameras; otherwise only proprio (--use_proprio)", essential=True
    )
    image_shift: int = arg(
        0,
        "--read_images: updates see images shifted at random by up to this many pixels (DrQ); edges repeat",
        minimum=0,
        read_if=switched_on("read_images"),
    )
    critic_state: bool = arg(
        False,
        "with --read_images: asymmetric critics, which read proprio and privileged simulator state (robosuite: "
        "--object_state) instead of images; the policy never reads that state",
        read_if=Condition(
            lambda flags: flags["read_images"] or not flags["critic_state"],
            "a policy without --read_images does not read it",
        ),
    )
    hidden_sizes: tuple[int, ...] = arg((256, 256), "widths of the hidden layers", minimum=1, metavar="WIDTH")
    gamma: float = arg(0.99, "discount per environment step", minimum=0, maximum=1, essential=True)
    n_step: int = arg(1, "decisions whose rewards are summed before a target bootstraps", minimum=1, maximum=1000)
    n_critics: int | None = arg(None, "critics (RLPD: 10) (default: 2; dsrl: 10)", minimum=1, maximum=1000)
    target_critics: int = arg(
        2, "size of the random subset of critics whose minimum is the TD target, redrawn for each update", minimum=1
    )
    actor_reduction: str | None = arg(
        None,
        "the actor loss uses the minimum or the mean (RLPD) over critics (default: min; dsrl: mean)",
        choices=CRITIC_REDUCTIONS,
    )
    entropy_in_target: bool = arg(True, "include the entropy bonus in TD targets (RLPD: off)")
    tau: float = arg(0.005, "soft update rate of the target networks", above=0, maximum=1)
    actor_learning_rate: float = arg(3e-4, "learning rate of the actor", minimum=0, essential=True)
    critic_learning_rate: float = arg(3e-4, "learning rate of the critics", minimum=0)
    temperature_learning_rate: float = arg(3e-4, "learning rate of the temperatures; 0: fixed temperatures", minimum=0)
    init_temperature: float = arg(0.1, "temperature of the entropy at the start (RLPD: 1)", above=0)
    target_entropy: float | None = arg(
        None,
        "target of the entropy of the parameters: minus this times their number (default: 1; dsrl: 0.5)",
        minimum=0,
    )
    primitive_target_entropy: float = arg(
        0.5,
        "target of the entropy of the choice of primitive: this times the largest",
        minimum=0,
        maximum=1,
        read_if=_PRIMITIVES,
    )
    choice_exploration: int = arg(
        0,
        "primitives: number of initial episodes with uniformly drawn primitives and parameters from the policy, so "
        "that all primitives are learned before one is preferred",
        minimum=0,
        read_if=_PRIMITIVES,
    )
    flow_matching_coef: float = arg(
        0.1,
        "flow: coefficient of the flow-matching loss in the actor loss, on demonstrations (--demos), or else on "
        "replayed decisions that the critics prefer to the policy's; 0: off",
        minimum=0,
        read_if=_FLOW,
    )
    cql_coef: float = arg(
        0.0,
        "gaussian: coefficient of the conservative penalty in the loss of the critics, calibrated by recorded returns "
        "(Cal-QL), which keeps values of decisions that were never recorded low; 0: off",
        minimum=0,
        read_if=equals("policy", "gaussian"),
    )
    cql_actions: int = arg(
        4, "decisions of the policy, and as many uniform ones, in the penalty", minimum=1, read_if=given("cql_coef")
    )
    reward_scale: float = arg(1.0, "factor on all rewards", above=0)


@dataclass(frozen=True)
class NoiseConfig:
    """The flow policy of `--policy dsrl`, and the range of its initial noise."""

    pretrain: str | None = arg(
        None,
        "dsrl: checkpoint folder of the flow policy, which is not trained",
        metavar="DIR",
        essential=True,
        aliases=("model_name_or_path",),
        read_if=_DSRL,
    )
    unnorm_key: str | None = arg(
        None,
        "dsrl: entry of its dataset statistics (default: the suite's name, or the only one)",
        metavar="KEY",
        read_if=_DSRL,
    )
    camera_map: tuple[str, ...] = arg((), CAMERA_MAP_HELP, nargs="+", metavar="CAMERA=FEATURE", read_if=_DSRL)
    platform: str | None = arg(None, PLATFORM_HELP, choices=tuple(PLATFORMS), read_if=_DSRL)
    flow_steps: int | None = arg(
        None,
        "flow, dsrl: denoising steps (default: flow 4; dsrl: the checkpoint's)",
        minimum=1,
        maximum=MAX_FLOW_STEPS,
        read_if=equals("policy", FLOW, DSRL),
    )
    noise_range: float = arg(1.0, "dsrl: the noise lies in [-x, x] for this x", above=0, maximum=10, read_if=_DSRL)
    repeat_noise: bool = arg(False, "dsrl: the same noise for all actions of a chunk", read_if=_DSRL)

    @property
    def of_the_base(self) -> dict[str, Any]:
        """Settings with which the flow policy is loaded, by the names of `PolicyConfig`."""
        learned = ("noise_range", "repeat_noise")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in learned}


@dataclass(frozen=True)
class ReplayConfig:
    """Replay buffer: capacity, priorities, rescoring, hindsight, demonstrations.

    Attributes:
        priority_options: options of the sampling priority.
    """

    replay_capacity: int = arg(
        100_000, "decisions that the replay buffer of a rank holds, one more for each episode", minimum=2
    )
    replay_eviction: str = arg(
        "fifo",
        "eviction from a full buffer: fifo (oldest episodes) or value (lowest priority, never the newest 10 %)",
        choices=("fifo", "value"),
        read_if=Condition(
            lambda flags: flags["replay_eviction"] == "fifo" or flags["replay_priority"] != "uniform",
            "with --replay_priority uniform all decisions have the same priority",
        ),
    )
    replay_priority: str = arg(
        "uniform",
        "sampling priority of a decision: uniform, td (its TD error), vlm (its score by a judge) or hybrid (both)",
        choices=REPLAY_PRIORITIES.names,
    )
    replay_score_source: str | None = arg(
        None,
        "vlm, hybrid: reward source that scores decisions: rm (progress of the reward machine), rm_model or vlm; with "
        "weight 0 in --reward it only scores",
        metavar="SOURCE",
        read_if=_BY_SCORE,
    )
    replay_beta: tuple[float, ...] = arg(
        (0.4, 1.0),
        "exponent of the importance weights at the start and at the end of the run",
        minimum=0,
        maximum=1,
        nargs=2,
        metavar="BETA",
        read_if=_BY_PRIORITY,
    )
    replay_share: tuple[float, ...] = arg(
        (1.0, 1.0),
        "share of a batch drawn by priority at the start and at the end of the run; the rest is uniform",
        minimum=0,
        maximum=1,
        nargs=2,
        metavar="SHARE",
        read_if=_BY_PRIORITY,
    )
    replay_weights: str = arg(
        "max",
        "importance weights: divided by the largest of the buffer, clipped at --replay_max_is_weight, or as they are",
        choices=NORMALISATIONS,
        read_if=_BY_PRIORITY,
    )
    replay_max_is_weight: float = arg(
        10.0,
        "--replay_weights clip: the largest importance weight",
        above=0,
        read_if=(_BY_PRIORITY, equals("replay_weights", "clip")),
    )
    replay_refresh_interval: int = arg(
        0,
        "recompute TD errors older than this many updates, oldest first; 0: only when a decision is drawn",
        minimum=0,
        read_if=_BY_PRIORITY,
    )
    replay_refresh_budget: int = arg(
        1024,
        "--replay_refresh_interval: maximum number of decisions per iteration and rank",
        minimum=1,
        read_if=given("replay_refresh_interval"),
    )
    replay_rescore_interval: int = arg(
        0,
        "--replay_score_source vlm and --read_images: request scores again that are missing or older than this many "
        "updates, while the next episodes are played; 0: never",
        minimum=0,
    )
    replay_rescore_budget: int = arg(
        200,
        "--replay_rescore_interval: decisions per iteration and rank; whole episodes, of which the last may exceed it",
        minimum=1,
        read_if=given("replay_rescore_interval"),
    )
    her_ratio: float = arg(
        0.0,
        "hindsight: mean number of relabelled copies per episode, with a state of the reward machine that it reached "
        "as the goal (--rm_state_input proprio)",
        minimum=0,
        maximum=10,
    )
    her_goal: str = arg(
        "future",
        "--her_ratio: the goal of a copy: final (the state reached last), episode (any that was reached) or future "
        "(any reached after a random decision, with which the copy begins)",
        choices=HER_GOALS,
        read_if=given("her_ratio"),
    )
    replay_stratified: bool = arg(
        True,
        "stratified sampling: one decision from each of equal segments; off: independent draws",
        read_if=_BY_PRIORITY,
    )
    demos: str | None = arg(
        None,
        "demonstrations that are part of every batch, in any format that train_sft_vla.py reads",
        metavar="PATH",
        essential=True,
    )
    dataset_camera: tuple[str, ...] = dataset_camera_flag(read_if=given("demos"))
    demo_share: float = arg(
        0.5, "--demos: fraction of each batch drawn from them (RLPD)", above=0, below=1, read_if=given("demos")
    )

    priority_options: Any = selected(REPLAY_PRIORITIES)

    def __post_init__(self) -> None:
        fill_selected(self)


@dataclass(frozen=True)
class SACStrategyConfig(StrategyConfig):
    """How DeepSpeed is run."""

    max_norm: float = arg(
        10.0,
        "maximum gradient norm; larger gradients are clipped to it",
        above=0,
        aliases=("max_grad_norm", "grad_clip"),
    )


@dataclass(frozen=True)
class SACGuardConfig(LoopGuardConfig):
    """Early termination of runs that cannot learn; random actions need not succeed."""

    max_bad_steps: int = max_bad_steps_flag()


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(TrainerConfig):
    """The configuration of a run with `SAC`; further attributes as in `TrainerConfig`.

    Attributes:
        sac: actor, critics, temperatures; without defaults that depend on the policy, see `DEFAULTS`.
        replay: the buffer.
        replay_folder: folder of the buffers of all ranks.
        success_reward: reward of the source `success`, by which demonstrations and hindsight are rewarded.
        machines: the reward source `rm`, or None without it.
        judge: the reward source of `replay_score_source`, or None without it.
    """

    batch: SACBatchConfig
    schedule: ScheduleConfig
    split: SplitConfig
    record: PolicyRecord
    reward_weights: Callable[[], dict[str, float]] = dict
    guards: SACGuardConfig = SACGuardConfig()
    optimization = LoopOptimizationConfig()
    shown_env: EnvConfig | None = None
    sac: SACConfig = field(default_factory=SACConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    replay_folder: Path = Path("replay")
    success_reward: float = 1.0
    machines: MachineSource | None = None
    judge: RewardSource | None = None

    @property
    def learner(self) -> str:
        """Soft actor-critic."""
        return SAC_NAME
