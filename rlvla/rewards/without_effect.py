"""Settings of rewards that nothing in a run reads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from rlvla.rewards.base import source_of
from rlvla.rewards.config import REWARD_MODEL, RewardConfig
from rlvla.rewards.vlm.config import VLMServerConfig
from rlvla.utils.cli.flags import as_typed
from rlvla.utils.errors import Problem

# What reads settings beside sources, in words that complete "add ... to --reward".
_SERVER = "vlm"  # any question to a VLM server: a reward, a proposition, success
_ONE_QUESTION = "vlm (without a question of its own)"
_SUCCESS_MODEL = "rm_model (or --success_source rm_model)"
# Prefix of a setting -> what reads it; the first match counts.
_USERS: dict[str, tuple[str, ...]] = {
    "reward_coef": ("success",),
    "success_reward": ("success",),
    "gamma_shaping": ("rm", "vlm reward"),
    "rm_model_batch_size": (_SUCCESS_MODEL, REWARD_MODEL),
    "rm_model_path": (_SUCCESS_MODEL,),
    "rm_model_": ("rm_model",),
    "rm_": ("rm",),
    **dict.fromkeys(("vlm_scorer", "vlm_prompt"), (_ONE_QUESTION,)),
    **dict.fromkeys((f.name for f in fields(VLMServerConfig)), (_SERVER,)),
    "vlm_": ("vlm reward",),
    "reward_fn_kwargs": ("reward_fn",),
    "reward_fn_": ("reward_fn", "remote"),
    "reward_fn": ("reward_fn",),
    "remote_rm_": ("remote",),
}


def settings_without_effect(config: RewardConfig, components: Collection[str], success_source: str) -> list[Problem]:
    """Settings that would be ignored.

    Args:
        config: the settings.
        components: the reward components of the run.
        success_source: what tells success.
    """
    readers = _readers(config, components, success_source)
    problems = []
    if config.overlong_penalty_factor != RewardConfig().overlong_penalty_factor and not config.overlong_buffer_len:
        text = "--overlong_penalty_factor has no effect without --overlong_buffer_len"
        problems.append(Problem("overlong_penalty_factor", "no_effect", text))
    for flag in fields(config):
        users = next((names for prefix, names in _USERS.items() if flag.name.startswith(prefix)), ())
        if users and not set(users) & readers and getattr(config, flag.name) != flag.default:
            named = " or ".join(name.removesuffix(" reward") for name in users if name != REWARD_MODEL)
            text = (
                f"--{flag.name} has no effect: add {named} to --reward, or leave it out (against a --config file: "
                f"{as_typed(flag.name, flag.default)})"
            )
            problems.append(Problem(flag.name, "no_effect", text))
    return problems


def _readers(config: RewardConfig, components: Collection[str], success_source: str) -> set[str]:
    sources = {source_of(name)[0] for name in components}
    readers = sources - {"vlm"}
    if "vlm" in sources:
        readers.add("vlm reward")
    if "vlm" in components:
        readers.add(_ONE_QUESTION)
    if "vlm" in sources or success_source == "vlm" or ("rm" in sources and config.rm_propositions == "vlm"):
        readers.add(_SERVER)
    if "rm_model" in sources or success_source == "rm_model":
        readers.add(_SUCCESS_MODEL)
    return readers
