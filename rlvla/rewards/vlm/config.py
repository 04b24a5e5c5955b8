"""Settings of vision-language models that judge: the server, and the VLM reward. Each field is a flag."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.rewards.vlm.questions import question_names
from rlvla.utils.cli.flags import arg

PROGRESS_TERMS = ("delta", "potential", "clipped_delta")


@dataclass(frozen=True)
class VLMServerConfig:
    """The server and its limits, for all questions of a run together."""

    vlm_url: str | None = arg(
        None,
        "vlm: base URL of an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1 (default: none)",
        metavar="URL",
    )
    vlm_model: str | None = arg(None, "vlm: name of the model there (default: none)")
    vlm_structured_output: bool = arg(True, "vlm: ask the server to keep to the JSON schema of the answer")
    vlm_timeout: float = arg(10.0, "vlm: seconds until an answer must have come", minimum=0.1, maximum=3600)
    vlm_warmup: float = arg(
        0.0,
        "vlm: seconds that the first answers may take instead, while the server loads and compiles; as many requests "
        "as may be under way at a time are then sent before the first rollout, too",
        minimum=0,
        maximum=86_400,
    )
    vlm_retries: int = arg(3, "vlm: further attempts after a failed one", minimum=0, maximum=100)
    vlm_concurrency: int = arg(
        32, "vlm: requests under way at a time, per rank, for all questions together", minimum=1, maximum=1024
    )
    vlm_max_tokens: int = arg(64, "vlm: longest answer in tokens", minimum=1, maximum=1_000_000)
    vlm_cache_size: int = arg(100_000, "vlm: answers kept, by model, prompt and images; 0: none", minimum=0)
    vlm_max_failures: float = arg(
        0.2,
        "vlm: the run stops when more than this share of the requests of an iteration, or of an evaluation, fails",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class VLMConfig(VLMServerConfig):
    """Questions, and conversion of answers to rewards."""

    vlm_scorer: str = arg("progress", "vlm: what the model is asked by the source vlm", choices=question_names)
    vlm_prompt: str | None = arg(
        None,
        "vlm: file with another prompt for --vlm_scorer; {task} is replaced by the instruction, {skill} by the task's "
        "name (default: the scorer's own)",
        metavar="FILE",
    )
    vlm_eval_frequency: int = arg(
        5, "vlm: least number of environment steps between judged frames (there is a frame at each decision)", minimum=1
    )
    vlm_episode_frames: int = arg(
        6, "vlm: frames of an episode that the question 'episode' is shown", minimum=1, maximum=1000
    )
    vlm_progress_term: str = arg(
        "delta",
        "vlm: p - p0; or gamma^n p - p0, which leaves the best policy as it is (not for methods that give an episode "
        "one advantage: it adds up to the same for all); or max(0, p - p0), which can be farmed",
        choices=PROGRESS_TERMS,
    )
    vlm_action_weight: float = arg(
        0.0, "vlm: weight of the action score, which pays for standing still, too", minimum=0
    )
    vlm_progress_weight: float = arg(0.8, "vlm: weight of the progress term", minimum=0)
    vlm_reward_scale: float = arg(2.0, "vlm: factor of the whole")
    vlm_curriculum: tuple[float, ...] = arg(
        (1.0, 0.1),
        "vlm: weight at the first and the last iteration, linear between",
        nargs=2,
        minimum=0,
        metavar="WEIGHT",
    )
    vlm_curriculum_inside: bool = arg(
        True, "vlm: with --vlm_progress_term potential the curriculum's weight belongs to the potential (off: to F)"
    )
