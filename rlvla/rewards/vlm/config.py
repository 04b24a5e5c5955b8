"""Settings of vision-language models that judge: the server, and the VLM reward. Each field is a flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvla.options import Condition, arg
from rlvla.rewards.base import component_of, used_by
from rlvla.rewards.vlm.questions import question_names

PROGRESS_TERMS = ("delta", "potential", "clipped_delta")


def _asks_a_vlm(flags: Mapping[str, Any]) -> bool:
    """A reward, a proposition of a reward machine or success is judged by a VLM."""
    machine = flags.get("rm_propositions") == "vlm" and used_by("rm").holds(flags)
    return used_by("vlm").holds(flags) or flags.get("success_source") == "vlm" or machine


_ASKED = Condition(_asks_a_vlm, "no VLM is asked: there is no vlm in --reward")
_REWARDS = used_by("vlm")
_WITHOUT_QUESTION = Condition(
    lambda flags: "reward" not in flags or "vlm" in map(component_of, flags["reward"]),
    "there is no vlm without a question of its own in --reward",
)


@dataclass(frozen=True)
class VLMServerConfig:
    """The server and its limits, for all questions of a run together."""

    vlm_url: str | None = arg(
        None,
        "base URL of an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1 (default: none)",
        metavar="URL",
        of=("reward", "vlm"),
        read_if=_ASKED,
    )
    vlm_model: str | None = arg(None, "name of the model there (default: none)", of=("reward", "vlm"), read_if=_ASKED)
    vlm_structured_output: bool = arg(
        True,
        "ask the server to keep to the JSON schema of the answer",
        of=("reward", "vlm"),
        read_if=_ASKED,
    )
    vlm_timeout: float = arg(
        10.0,
        "seconds until an answer must have come",
        minimum=0.1,
        maximum=3600,
        of=("reward", "vlm"),
        read_if=_ASKED,
    )
    vlm_warmup: float = arg(
        0.0,
        "seconds that the first answers may take instead, while the server loads and compiles; as many requests "
        "as may be under way at a time are then sent before the first rollout, too",
        minimum=0,
        maximum=86_400,
        of=("reward", "vlm"),
        read_if=_ASKED,
    )
    vlm_retries: int = arg(
        3, "further attempts after a failed one", minimum=0, maximum=100, of=("reward", "vlm"), read_if=_ASKED
    )
    vlm_concurrency: int = arg(
        32,
        "requests under way at a time, per rank, for all questions together",
        minimum=1,
        maximum=1024,
        of=("reward", "vlm"),
        read_if=_ASKED,
    )
    vlm_max_tokens: int = arg(
        64, "longest answer in tokens", minimum=1, maximum=1_000_000, of=("reward", "vlm"), read_if=_ASKED
    )
    vlm_cache_size: int = arg(
        100_000,
        "answers kept, by model, prompt and images; 0: none",
        minimum=0,
        of=("reward", "vlm"),
        read_if=_ASKED,
    )
    vlm_max_failures: float = arg(
        0.2,
        "the run stops when more than this share of the requests of an iteration, or of an evaluation, fails",
        minimum=0,
        maximum=1,
        of=("reward", "vlm"),
        read_if=_ASKED,
    )


@dataclass(frozen=True)
class VLMConfig(VLMServerConfig):
    """Questions, and conversion of answers to rewards."""

    vlm_scorer: str = arg(
        "progress",
        "what the model is asked by the source vlm",
        choices=question_names,
        of=("reward", "vlm"),
        read_if=_WITHOUT_QUESTION,
    )
    vlm_prompt: str | None = arg(
        None,
        "file with another prompt for --vlm_scorer; {task} is replaced by the instruction, {skill} by the task's "
        "name (default: the scorer's own)",
        metavar="FILE",
        of=("reward", "vlm"),
        read_if=_WITHOUT_QUESTION,
    )
    vlm_eval_frequency: int = arg(
        5,
        "least number of environment steps between judged frames (there is a frame at each decision)",
        minimum=1,
        of=("reward", "vlm"),
        read_if=_REWARDS,
    )
    vlm_episode_frames: int = arg(
        6,
        "frames of an episode that the question 'episode' is shown",
        minimum=1,
        maximum=1000,
        of=("reward", "vlm"),
        read_if=_REWARDS,
    )
    vlm_progress_term: str = arg(
        "delta",
        "p - p0; or gamma^n p - p0, which leaves the best policy as it is (not for methods that give an episode "
        "one advantage: it adds up to the same for all); or max(0, p - p0), which can be farmed",
        choices=PROGRESS_TERMS,
        of=("reward", "vlm"),
        read_if=_REWARDS,
    )
    vlm_action_weight: float = arg(
        0.0,
        "weight of the action score, which pays for standing still, too",
        minimum=0,
        of=("reward", "vlm"),
        read_if=_REWARDS,
    )
    vlm_progress_weight: float = arg(
        0.8, "weight of the progress term", minimum=0, of=("reward", "vlm"), read_if=_REWARDS
    )
    vlm_reward_scale: float = arg(2.0, "factor of the whole", of=("reward", "vlm"), read_if=_REWARDS)
    vlm_curriculum: tuple[float, ...] = arg(
        (1.0, 0.1),
        "weight at the first and the last iteration, linear between",
        nargs=2,
        minimum=0,
        metavar="WEIGHT",
        of=("reward", "vlm"),
        read_if=_REWARDS,
    )
    vlm_curriculum_inside: bool = arg(
        True,
        "with --vlm_progress_term potential the curriculum's weight belongs to the potential (off: to F)",
        of=("reward", "vlm"),
        read_if=_REWARDS,
    )
