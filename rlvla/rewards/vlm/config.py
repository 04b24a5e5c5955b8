"""Settings of vision-language models that judge: the server, and the VLM reward. Each field is a flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlvla.options import Condition, arg
from rlvla.rewards.base import component_of, used_by
from rlvla.rewards.vlm.questions import question_names

PROGRESS_TERMS = ("delta", "potential", "clipped_delta")


def _asks_a_vlm(flags: Mapping[str, Any]) -> bool:
    """A reward, a proposition of a reward machine or success is judged by a VLM."""
    machine = flags.get("rm_propositions") == "vlm" and used_by("rm").holds(flags)
    return used_by("vlm").holds(flags) or flags.get("success_source") == "vlm" or machine


_arg = partial(arg, of=("reward", "vlm"))
_server_arg = partial(
    _arg,
    read_if=Condition(_asks_a_vlm, "no VLM is asked: there is no vlm in --reward, and --success_source is not vlm"),
)
_reward_arg = partial(_arg, read_if=used_by("vlm"))
_question_arg = partial(
    _arg,
    read_if=Condition(
        lambda flags: "vlm" in map(component_of, flags["reward"]),
        "there is no vlm without its own question in --reward",
    ),
)


@dataclass(frozen=True)
class VLMServerConfig:
    """The server and its limits, for all questions of a run together."""

    vlm_url: str | None = _server_arg(
        None, "base URL of an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1 (default: none)", metavar="URL"
    )
    vlm_model: str | None = _server_arg(None, "name of the model there (default: none)")
    vlm_structured_output: bool = _server_arg(True, "ask the server to keep to the JSON schema of the answer")
    vlm_timeout: float = _server_arg(10.0, "deadline of an answer in seconds", minimum=0.1, maximum=3600)
    vlm_warmup: float = _server_arg(
        0.0,
        "deadline of the first answers in seconds, while the server loads and compiles; --vlm_concurrency requests "
        "are then sent before the first rollout (0: no warm-up)",
        minimum=0,
        maximum=86_400,
    )
    vlm_retries: int = _server_arg(3, "further attempts after a failed one", minimum=0, maximum=100)
    vlm_concurrency: int = _server_arg(
        32, "maximum concurrent requests per rank, for all questions together", minimum=1, maximum=1024
    )
    vlm_max_tokens: int = _server_arg(64, "maximum length of an answer in tokens", minimum=1, maximum=1_000_000)
    vlm_cache_size: int = _server_arg(100_000, "cached answers, by model, prompt and images; 0: none", minimum=0)
    vlm_max_failures: float = _server_arg(
        0.2,
        "the run stops when more than this share of the requests of an iteration, or of an evaluation, fails",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class VLMConfig(VLMServerConfig):
    """Questions, and conversion of answers to rewards."""

    vlm_scorer: str = _question_arg("progress", "question of the source vlm", choices=question_names)
    vlm_prompt: str | None = _question_arg(
        None,
        "file with another prompt for --vlm_scorer; {task} is replaced by the instruction, {skill} by the task's "
        "name (default: the scorer's own)",
        metavar="FILE",
    )
    vlm_eval_frequency: int = _reward_arg(
        5, "minimum number of environment steps between scored frames (there is a frame at each decision)", minimum=1
    )
    vlm_episode_frames: int = _reward_arg(6, "frames of an episode in the question 'episode'", minimum=1, maximum=1000)
    vlm_progress_term: str = _reward_arg(
        "delta",
        "p - p0; or gamma^n p - p0, which keeps the optimal policy (not for methods with one advantage per episode: "
        "its sum is the same for all); or max(0, p - p0), which losing and regaining progress exploits",
        choices=PROGRESS_TERMS,
    )
    vlm_action_weight: float = _reward_arg(
        0.0, "weight of the action score, which also rewards standing still", minimum=0
    )
    vlm_progress_weight: float = _reward_arg(0.8, "weight of the progress term", minimum=0)
    vlm_reward_scale: float = _reward_arg(2.0, "factor of the reward")
    vlm_curriculum: tuple[float, ...] = _reward_arg(
        (1.0, 0.1), "weight at the first and the last iteration, linear between", nargs=2, minimum=0, metavar="WEIGHT"
    )
    vlm_curriculum_inside: bool = _reward_arg(
        True, "with --vlm_progress_term potential the curriculum's weight belongs to the potential (off: to F)"
    )
