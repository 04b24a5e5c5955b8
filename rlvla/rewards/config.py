"""Settings of the reward sources. Each field is a flag of `cli/train_ppo_vla.py` and `cli/score_episodes.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rlvla.options import Condition, arg, equals, every, fill_selected, from_values, given, switched_on
from rlvla.rewards.base import REWARDS, used_by
from rlvla.rewards.machines import GOAL_STAGES
from rlvla.rewards.reward_machine import ADVANCES, AFTER_SUCCESS, CREDITS, MODES, ORDERS
from rlvla.rewards.vlm.config import VLMConfig, VLMServerConfig

STATE_INPUTS = ("none", "prompt", "proprio")
PAYS = ("progress", "final")
PROPOSITIONS = ("simulator", "vlm")
REWARD_MODEL = "reward_model"  # the source that --reward_pretrain adds


_WITH_MACHINE = used_by("rm")
_WITH_VLM_PROPOSITIONS = (_WITH_MACHINE, equals("rm_propositions", "vlm"))
_WITH_MODEL = Condition(
    lambda flags: (
        used_by("rm_model").holds(flags)
        or flags.get("success_source") == "rm_model"
        or bool(flags.get("reward_pretrain"))
    ),
    "there is no rm_model in --reward, and --success_source is not rm_model",
)


_machine_arg = partial(arg, of=("reward", "rm"), read_if=_WITH_MACHINE)


@dataclass(frozen=True)
class ScoringModelConfig:
    """The learned reward model."""

    rm_model_path: str | None = arg(
        None,
        "folder of a reward model made by cli/train_rm_vla.py (default: none)",
        metavar="DIR",
        of=("reward", "rm_model"),
        read_if=_WITH_MODEL,
    )
    rm_model_batch_size: int = arg(
        256,
        "rm_model, --reward_pretrain: frames per forward pass",
        minimum=1,
        of=("reward", "rm_model"),
        read_if=_WITH_MODEL,
    )


@dataclass(frozen=True)
class JudgeConfig(VLMServerConfig, ScoringModelConfig):
    """Success detectors of an evaluation."""


@dataclass(frozen=True)
class RewardConfig(VLMConfig, ScoringModelConfig):
    """Reward sources with their settings, and settings common to all sources.

    Attributes:
        sources: options of the registered sources, see `rlvla.options.options_of`.
    """

    reward: tuple[str, ...] = arg(
        ("success:1.0",),
        "reward sources with their weights, added up: success, env (the simulator's own reward), env_progress (its "
        "changes), rm, vlm, rm_model, reward_fn, remote, or your own; vlm:QUESTION:WEIGHT once for each question to a "
        "VLM (progress, grasp, ...)",
        nargs="+",
        metavar="NAME:WEIGHT",
        essential=True,
    )
    reward_schedule: tuple[str, ...] = arg(
        (),
        "factors on weights that change over training, e.g. rm:linear:1.0:0.1 (shapes: linear, cosine, step)",
        metavar="NAME:SHAPE:START:END",
    )
    gamma_shaping: float | None = arg(
        None,
        "discount of potential-based shaping; must equal the learner's (default: --gamma, 1 without a critic)",
        minimum=0,
        maximum=1,
        read_if=used_by("rm", "vlm"),
    )
    dynamic_truncation: bool = arg(
        False, "truncate an episode in which a source with progress (rm, vlm) sees none for --truncation_patience steps"
    )
    truncation_patience: int = arg(
        30,
        "environment steps without progress before truncation",
        minimum=1,
        read_if=switched_on("dynamic_truncation"),
    )
    truncation_min_gain: float = arg(
        0.02,
        "smallest gain over the best progress so far that counts as progress",
        above=0,
        maximum=1,
        read_if=switched_on("dynamic_truncation"),
    )
    rm_machine: str = _machine_arg(
        "auto",
        "lift, stack, door, pick_place, wipe, nut, cleanup, peg_in_hole, auto (that of the task), or a file "
        "(.yaml, .json) that declares states, edges, validators and potentials",
        metavar="NAME|FILE",
    )
    rm_formula: str | None = _machine_arg(
        None,
        "an LTLf formula over the environment's events instead, e.g. 'F(grasped & F lifted)' (default: none)",
        lines=True,
    )
    rm_goal_order: str = _machine_arg(
        "any", "order in which the predicates of LIBERO's goals must be reached", choices=("any", "listed")
    )
    rm_goal_stages: str = _machine_arg(
        "predicates",
        "stages of the machines of LIBERO's goals: the predicates; manipulation: for each object to be moved also "
        "grasping and lifting it",
        choices=GOAL_STAGES,
    )
    rm_validation: bool = _machine_arg(True, "fall back when a state's validator is violated for --rm_grace steps")
    rm_mode: str = _machine_arg("hybrid", "composition of the reward", choices=MODES)
    rm_order: str = _machine_arg(
        "transition_first", "whether edges or validators come first within a step", choices=ORDERS
    )
    rm_advance: str = _machine_arg("one", "edges taken per step, for machines that are not formulas", choices=ADVANCES)
    rm_grace: int | None = _machine_arg(
        None, "consecutive violating steps before a fallback (default: a quarter of a second)", minimum=0
    )
    rm_credit: str = _machine_arg("first_visit", "when an edge pays its transition reward", choices=CREDITS)
    rm_state_input: str = _machine_arg(
        "none",
        "show the policy the machine's state, as a phrase of its prompt ('..., stage u1') or one-hot after its "
        "proprio; recorded with the policy and used by evaluations",
        choices=STATE_INPUTS,
    )
    rm_propositions: str = _machine_arg(
        "simulator",
        "source of the propositions: the simulator, or vlm: a yes-no question to --vlm_model about each",
        choices=PROPOSITIONS,
    )
    rm_propositions_every: int = _machine_arg(
        1,
        "decisions between frames shown to the VLM; the last frame of an episode always is",
        minimum=1,
        read_if=_WITH_VLM_PROPOSITIONS,
    )
    rm_propositions_wait: bool = _machine_arg(
        False,
        "wait for the VLM's answers before the next action, so that the machine can end the episode; otherwise the "
        "machine runs after the episode",
        read_if=_WITH_VLM_PROPOSITIONS,
    )
    rm_sentences: tuple[str, ...] = _machine_arg(
        (),
        "sentences for the VLM in place of the built-in ones; may define new propositions for --rm_formula",
        metavar="NAME=SENTENCE",
        read_if=_WITH_VLM_PROPOSITIONS,
    )
    rm_transition_reward: float = _machine_arg(0.25, "reward of an edge")
    rm_terminal_reward: float = _machine_arg(1.0, "reward of the goal, once")
    rm_potential_scale: float = _machine_arg(0.1, "factor of the shaping (mode hybrid)", minimum=0)
    rm_after_success: str = _machine_arg(
        "terminate", "at the goal: stay, or run on and fall back when success is lost", choices=AFTER_SUCCESS
    )
    rm_model_pay: str = arg(
        "progress",
        "reward: the change of progress over each decision, or P(success) of the last frame at the end",
        choices=PAYS,
        of=("reward", "rm_model"),
        read_if=used_by("rm_model"),
    )
    reward_pretrain: str | None = arg(
        None,
        "folder of a reward model: short for the source rm_model with --rm_model_pay final, logged as reward_model "
        "(default: none)",
        metavar="DIR",
        of=("reward", "rm_model"),
    )
    reward_model_coef: float = arg(
        1.0,
        "weight of the reward model of --reward_pretrain",
        of=("reward", "rm_model"),
        read_if=given("reward_pretrain"),
    )
    sources: Any = every(REWARDS)

    def __post_init__(self) -> None:
        fill_selected(self)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources in `reward`, without questions and weights."""
        return tuple(spec.partition(":")[0] for spec in self.reward)

    @classmethod
    def from_flags(cls, **values: Any) -> RewardConfig:
        """The configuration with these flags, options of the sources included."""
        return from_values(cls, values)
