"""Settings of the reward sources. Each field is a flag of `cli/train_ppo_vla.py` and `cli/score_episodes.py`."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.rewards.machines import GOAL_STAGES
from rlvla.rewards.reward_machine import ADVANCES, AFTER_SUCCESS, CREDITS, MODES, ORDERS
from rlvla.rewards.vlm.config import VLMConfig, VLMServerConfig
from rlvla.utils.cli.flags import arg

STATE_INPUTS = ("none", "prompt", "proprio")
PAYS = ("progress", "final")
PROPOSITIONS = ("simulator", "vlm")
REWARD_MODEL = "reward_model"  # the source that --reward_pretrain adds
OVERLONG = "overlong"  # the source that --overlong_buffer_len adds


@dataclass(frozen=True)
class ScoringModelConfig:
    """The learned reward model."""

    rm_model_path: str | None = arg(
        None,
        "folder of a reward model made by cli/train_rm_vla.py (default: none)",
        metavar="DIR",
        of=("reward", "rm_model"),
    )
    rm_model_batch_size: int = arg(
        256, "rm_model, --reward_pretrain: frames per forward pass", minimum=1, of=("reward", "rm_model")
    )


@dataclass(frozen=True)
class JudgeConfig(VLMServerConfig, ScoringModelConfig):
    """Models that tell success in an evaluation."""


@dataclass(frozen=True)
class RewardConfig(VLMConfig, ScoringModelConfig):
    """Reward sources with their settings, and settings common to all sources."""

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
    reward_coef: float = arg(1.0, "what it is worth (SimpleVLA-RL: 5)", of=("reward", "success"))
    success_reward: str = arg(
        "at_end",
        "paid when it was held until the episode terminates, or when it is seen for the first time",
        choices=("at_end", "once"),
        of=("reward", "success"),
    )
    gamma_shaping: float | None = arg(
        None,
        "discount of potential-based shaping; must equal the learner's (default: --gamma, 1 without a critic)",
        minimum=0,
        maximum=1,
    )
    overlong_buffer_len: int = arg(
        0, "penalize each of the last so many environment steps before the step limit; 0: no penalty", minimum=0
    )
    overlong_penalty_factor: float = arg(
        1.0,
        "--overlong_buffer_len: what an episode that reaches the step limit loses, linear in its last steps",
        above=0,
    )
    dynamic_truncation: bool = arg(
        False, "truncate an episode in which a source with progress (rm, vlm) sees none for --truncation_patience steps"
    )
    truncation_patience: int = arg(30, "environment steps without progress that are waited for", minimum=1)
    truncation_min_gain: float = arg(0.02, "gain over the best progress so far that counts", above=0, maximum=1)
    rm_machine: str = arg(
        "auto",
        "lift, stack, door, pick_place, wipe, nut, cleanup, peg_in_hole, auto (that of the task), or a file "
        "(.yaml, .json) that declares states, edges, validators and potentials",
        metavar="NAME|FILE",
        of=("reward", "rm"),
    )
    rm_formula: str | None = arg(
        None,
        "an LTLf formula over the environment's events instead, e.g. 'F(grasped & F lifted)' (default: none)",
        lines=True,
        of=("reward", "rm"),
    )
    rm_goal_order: str = arg(
        "any",
        "the predicates of LIBERO's goals are reached in any order, or as listed",
        choices=("any", "listed"),
        of=("reward", "rm"),
    )
    rm_goal_stages: str = arg(
        "predicates",
        "the states of the machines of LIBERO's goals: predicates alone, or for each object that is to be moved "
        "also grasping and lifting it",
        choices=GOAL_STAGES,
        of=("reward", "rm"),
    )
    rm_validation: bool = arg(
        True, "fall back when a state's validator is violated for --rm_grace steps", of=("reward", "rm")
    )
    rm_mode: str = arg("hybrid", "what is paid", choices=MODES, of=("reward", "rm"))
    rm_order: str = arg("transition_first", "what comes first within a step", choices=ORDERS, of=("reward", "rm"))
    rm_advance: str = arg(
        "one", "edges per step, for machines that are not formulas", choices=ADVANCES, of=("reward", "rm")
    )
    rm_grace: int | None = arg(
        None,
        "consecutive violating steps before it falls back (default: a quarter of a second)",
        minimum=0,
        of=("reward", "rm"),
    )
    rm_credit: str = arg("first_visit", "when an edge pays its transition reward", choices=CREDITS, of=("reward", "rm"))
    rm_state_input: str = arg(
        "none",
        "tell the policy the machine's state, as a phrase of its prompt ('..., stage u1') or one-hot behind its "
        "proprio; recorded with the policy, so that evaluations do the same",
        choices=STATE_INPUTS,
        of=("reward", "rm"),
    )
    rm_propositions: str = arg(
        "simulator",
        "who says which propositions hold: the simulator, or vlm: --vlm_model is asked yes or no about each",
        choices=PROPOSITIONS,
        of=("reward", "rm"),
    )
    rm_propositions_every: int = arg(
        1,
        "decisions between frames about which a VLM is asked; the last frame of an episode always is",
        minimum=1,
        of=("reward", "rm"),
    )
    rm_propositions_wait: bool = arg(
        False,
        "an episode waits for a VLM's answers before its next action, so that the machine can end it; otherwise "
        "the machine follows the episode when it is over",
        of=("reward", "rm"),
    )
    rm_sentences: tuple[str, ...] = arg(
        (),
        "sentences that a VLM is asked about instead of the known ones; they may name new propositions for "
        "--rm_formula",
        metavar="NAME=SENTENCE",
        of=("reward", "rm"),
    )
    rm_transition_reward: float = arg(0.25, "reward of an edge", of=("reward", "rm"))
    rm_terminal_reward: float = arg(1.0, "reward of the goal, once", of=("reward", "rm"))
    rm_potential_scale: float = arg(0.1, "factor of the shaping (mode hybrid)", minimum=0, of=("reward", "rm"))
    rm_after_success: str = arg(
        "terminate",
        "at the goal the machine stays, or runs on and falls back when success is lost",
        choices=AFTER_SUCCESS,
        of=("reward", "rm"),
    )
    rm_model_pay: str = arg(
        "progress",
        "what is paid: the change of progress over each decision, or P(success) of the last frame at the end",
        choices=PAYS,
        of=("reward", "rm_model"),
    )
    reward_pretrain: str | None = arg(
        None,
        "folder of a reward model: short for the source rm_model with --rm_model_pay final, logged as reward_model "
        "(default: none)",
        metavar="DIR",
        of=("reward", "rm_model"),
    )
    reward_model_coef: float = arg(1.0, "weight of the reward model of --reward_pretrain", of=("reward", "rm_model"))
    reward_fn: str | None = arg(
        None,
        "your function, called with a list of finished episodes (default: none)",
        metavar="FILE.py:FUNCTION",
        of=("reward", "reward_fn"),
    )
    reward_fn_kwargs: tuple[str, ...] = arg(
        (),
        "keyword arguments of your function: KEY=VALUE pairs (values as JSON, or else text) or one JSON object",
        metavar="KEY=VALUE",
        of=("reward", "reward_fn"),
    )
    reward_fn_batch_size: int = arg(
        8, "reward_fn, remote: episodes per call", minimum=1, of=("reward", "reward_fn", "remote")
    )
    reward_fn_workers: int = arg(
        4,
        "reward_fn, remote: calls at a time, beside the rollout",
        minimum=1,
        maximum=1024,
        of=("reward", "reward_fn", "remote"),
    )
    remote_rm_url: str | None = arg(
        None,
        "HTTP server that is sent finished episodes as JSON (default: none)",
        metavar="URL",
        of=("reward", "remote"),
    )
    remote_rm_timeout: float = arg(
        30.0, "seconds until an answer must have come", minimum=0.1, maximum=3600, of=("reward", "remote")
    )
    remote_rm_retries: int = arg(
        3, "further attempts after a failed one", minimum=0, maximum=100, of=("reward", "remote")
    )
    remote_rm_images: bool = arg(False, "send the frames of the first camera as PNG, too", of=("reward", "remote"))
