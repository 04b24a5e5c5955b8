"""Building a new small policy to start from: `--pretrain tiny` or `--pretrain compact`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rlvla.data.demonstrations import Demonstrations
from rlvla.envs.registry import Suite, get_suite, is_known
from rlvla.models.action_heads import missing_of
from rlvla.models.compact.config import CompactConfig, layers_for
from rlvla.models.compact.family import build_compact, compact_option_problems
from rlvla.models.config import ActorConfig
from rlvla.models.flow.head import MISSING_OF_FLOWS
from rlvla.models.lerobot.new import (
    TINY_FAMILIES,
    NewPolicyFacts,
    NewPolicySizes,
    build_new_policy,
    new_policy_problems,
)
from rlvla.models.lerobot.settings import read_camera_map
from rlvla.models.vla.choices import REGRESSION
from rlvla.trainer.supervised.config import NEW_MODELS, NewModelConfig, SFTRunConfig, SupervisedRunConfig
from rlvla.utils.cli.flags import no_effect
from rlvla.utils.errors import Problem

# Default sizes of a tiny model on action tokens.
_TINY = {"tiny_patch_size": 8, "tiny_vision_dim": 48, "tiny_vision_depth": 3, "tiny_llm_dim": 64, "tiny_llm_layers": 3}


def is_new(pretrain: str) -> bool:
    """Whether `--pretrain` names a kind of new model rather than a folder."""
    return pretrain in NEW_MODELS


def size_problems(run: SupervisedRunConfig, sizes: NewModelConfig) -> list[Problem]:
    """Sizes of a kind of new model (`--tiny_...`, `--compact_...`) that is not the one to build."""
    return [
        no_effect(f.name, value, f"it describes a new {kind} model, and --pretrain is {run.pretrain}")
        for f in fields(sizes)
        if (kind := "tiny" if f.name == "model_family" else f.name.partition("_")[0]) in NEW_MODELS
        and kind != run.pretrain
        and (value := getattr(sizes, f.name)) != f.default
    ]


def new_model_problems(
    run: SupervisedRunConfig,
    sizes: NewModelConfig,
    demos: Demonstrations | None,
    actor: ActorConfig | None = None,
) -> list[Problem]:
    """Problems of the sizes of a new model, of its fit to the demonstrations and of options of the policy."""
    if _is_lerobot(run, sizes):
        problems = _lerobot_problems(run, sizes, demos, actor)
    else:
        problems = (_tiny_problems if run.pretrain == "tiny" else _compact_problems)(run, _sized(sizes), demos)
        problems += foreign_option_problems(run, actor)
    if run.pretrain == "compact" and actor is not None:
        problems += compact_option_problems(actor)
    return problems if demos is None else problems + unnorm_key_problems(run, demos)


def unnorm_key_problems(run: SupervisedRunConfig, demos: Demonstrations) -> list[Problem]:
    """A key that names no entry of the demonstrations' statistics."""
    if run.unnorm_key is None or run.unnorm_key in demos.statistics:
        return []
    text = f"--unnorm_key {run.unnorm_key}: {run.demos[0]} has statistics for {', '.join(sorted(demos.statistics))}"
    return [Problem("unnorm_key", "unknown_name", text)]


def missing_of_new(run: SFTRunConfig, sizes: NewModelConfig) -> Mapping[str, str]:
    """What a new model does not support, see `PolicySpec.missing`."""
    if run.pretrain == "tiny" and not _is_lerobot(run, sizes):
        return missing_of(run.model_variant)
    if run.pretrain == "tiny" or sizes.compact_head == "flow":
        return MISSING_OF_FLOWS
    return missing_of(REGRESSION if sizes.compact_head == "gaussian" else None)


def new_model(
    folder: Path,
    demos: Demonstrations,
    run: SupervisedRunConfig,
    sizes: NewModelConfig,
    model_variant: str | None = None,
) -> None:
    """Build a new model that fits the demonstrations; `model_variant` of a tiny one defaults to oft."""
    if _is_lerobot(run, sizes):
        facts = lerobot_facts(demos, run, sizes)
        build_new_policy(sizes.model_family, folder, facts, _lerobot_sizes(sizes), seed=run.seed)
    elif run.pretrain == "tiny":
        _new_tiny(folder, demos, run, _sized(sizes), model_variant)
    else:
        build_compact(folder, _compact_config(demos, run, sizes), demos.statistics, seed=run.seed)


def _is_lerobot(run: SupervisedRunConfig, sizes: NewModelConfig) -> bool:
    """Whether the model to build is one in LeRobot's format."""
    return run.pretrain == "tiny" and sizes.model_family != TINY_FAMILIES[0]


def _sized(sizes: NewModelConfig) -> NewModelConfig:
    """With the default sizes of a model on tokens in place of those that are not given."""
    return replace(sizes, **{name: value for name, value in _TINY.items() if getattr(sizes, name) is None})


def _chunk(sizes: NewModelConfig, demos: Demonstrations) -> int:
    """Actions per decision, by default as the suite of the demonstrations has it."""
    suite = str(demos.env_args.get("task_suite_name"))
    return sizes.action_chunk_len or (get_suite(suite).chunk if is_known(suite) else Suite.chunk)


def _lerobot_sizes(sizes: NewModelConfig) -> NewPolicySizes:
    return NewPolicySizes(**{f.name: getattr(sizes, f"tiny_{f.name}") for f in fields(NewPolicySizes)})


def lerobot_facts(demos: Demonstrations, run: SupervisedRunConfig, sizes: NewModelConfig) -> NewPolicyFacts:
    """What a LeRobot policy for demonstrations with proprioception must fit."""
    suite, proprio = str(demos.env_args.get("task_suite_name")), demos.proprio
    key = run.unnorm_key or (suite if suite in demos.statistics else next(iter(demos.statistics)))
    assert proprio is not None
    return NewPolicyFacts(
        sentences=sorted(set(demos.instructions)),
        statistics=demos.statistics[key],
        unnorm_key=key,
        cameras=tuple(run.cameras or demos.env_args["cameras"]),
        image_size=demos.images[0].shape[2],
        chunk_len=_chunk(sizes, demos),
        state_dim=proprio[0].shape[1],
        action_dim=demos.actions[0].shape[1],
        camera_map=read_camera_map(getattr(run, "camera_map", ()))[0],
    )


def _lerobot_problems(
    run: SupervisedRunConfig, sizes: NewModelConfig, demos: Demonstrations | None, actor: ActorConfig | None
) -> list[Problem]:
    family = sizes.model_family
    names = ("model_variant", "platform", "center_crop", "action_std", "action_std_init", "camera_map", "fit_to_demos")
    problems = [
        no_effect(name, value, f"it describes public checkpoints, and --pretrain is {f'{family} policy'}")
        for name in names
        if (value := getattr(run, name, None))
    ]
    problems += new_policy_problems(family, _lerobot_sizes(sizes), actor)
    if not run.use_proprio:
        text = f"--no-use_proprio: a {family} policy reads the robot's state; leave it out"
        problems.append(Problem("use_proprio", "no_state", text))
    elif demos is not None and demos.proprio is None:
        text = (
            f"--demos {' '.join(run.demos)} has no proprioception, which a {family} policy reads as the robot's state"
        )
        problems.append(Problem("demos", "no_state", text))
    return problems


def foreign_option_problems(run: SupervisedRunConfig, actor: ActorConfig | None) -> list[Problem]:
    """Options of LeRobot policies, given for a new model of another kind."""
    given = {"camera_map": getattr(run, "camera_map", ()) or None}
    given["fit_to_demos"] = getattr(run, "fit_to_demos", False) or None
    given["train_expert_only"] = None if actor is None else actor.train_expert_only
    return [
        no_effect(name, value, f"it is for policies in LeRobot's format, and --pretrain is {run.pretrain}")
        for name, value in given.items()
        if value is not None
    ]


def _compact_config(demos: Demonstrations, run: SupervisedRunConfig, sizes: NewModelConfig) -> CompactConfig:
    size, channels = demos.images[0].shape[2], tuple(sizes.compact_channels)
    kernels, strides = layers_for(size, len(channels))
    given = {name: getattr(run, name, None) for name in ("action_std", "action_std_init")}
    return CompactConfig(
        image_size=size,
        num_images_in_input=demos.images[0].shape[1],
        proprio_dim=demos.proprio[0].shape[1] if run.use_proprio and demos.proprio is not None else 0,
        action_dim=demos.actions[0].shape[1],
        action_chunk_len=_chunk(sizes, demos),
        action_head=sizes.compact_head,
        channels=channels,
        kernels=kernels,
        strides=strides,
        width=sizes.compact_width,
        action_normalization=_normalization(next(iter(demos.statistics.values()))["action"]),
        **{name: value for name, value in given.items() if value is not None},
    )


def _normalization(actions: Mapping[str, Any]) -> str:
    """The range to normalize by: bounds if that of the quantiles hides rare actions, such as pulses of a gripper."""
    ranges = zip(actions["q01"], actions["q99"], actions["min"], actions["max"])
    return "bounds" if any(low == high and least < most for low, high, least, most in ranges) else "q99"


def _compact_problems(run: SupervisedRunConfig, sizes: NewModelConfig, demos: Demonstrations | None) -> list[Problem]:
    given = {name: getattr(run, name, None) for name in ("model_variant", "platform", "center_crop")}
    problems = [
        no_effect(name, value, "it describes public checkpoints, and --pretrain is compact")
        for name, value in given.items()
        if value
    ]
    if sizes.compact_head != "gaussian":
        problems += _std_problems(run, "--compact_head gaussian")
    if demos is not None and not problems:
        problems += [Problem(None, "out_of_range", text) for text in _compact_config(demos, run, sizes).problems()]
    return problems


def _tiny_problems(run: SupervisedRunConfig, tiny: NewModelConfig, demos: Demonstrations | None) -> list[Problem]:
    from rlvla.models.vla.tiny import LLM_HEAD_WIDTH, default_heads

    problems = []
    if tiny.tiny_vision_dim % 4:
        text = f"--tiny_vision_dim {tiny.tiny_vision_dim} must be a multiple of 4"
        problems.append(Problem("tiny_vision_dim", "not_divisible", text))
    heads = default_heads(max(1, tiny.tiny_llm_dim), LLM_HEAD_WIDTH)
    if tiny.tiny_llm_dim // heads % 2:  # rotary embeddings rotate pairs of channels
        text = (
            f"--tiny_llm_dim {tiny.tiny_llm_dim} gives {heads} head(s) of odd width; take a multiple of "
            f"{LLM_HEAD_WIDTH}"
        )
        problems.append(Problem("tiny_llm_dim", "not_divisible", text))
    variant = getattr(run, "model_variant", None)
    if variant == "autoregressive" and tiny.action_chunk_len not in (None, 1):
        text = f"--action_chunk_len {tiny.action_chunk_len}: an autoregressive model predicts one action; leave it out"
        problems.append(Problem("action_chunk_len", "contradiction", text))
    if variant != REGRESSION:
        problems += _std_problems(run, f"--model_variant {REGRESSION}")
    platform = getattr(run, "platform", None)
    if platform is not None:
        problems.append(no_effect("platform", platform, "it describes public checkpoints, and --pretrain is tiny"))
    size = 0 if demos is None else demos.images[0].shape[2]
    if tiny.tiny_patch_size > 0 and size % tiny.tiny_patch_size:
        text = f"--tiny_patch_size {tiny.tiny_patch_size} must divide the image size {size}"
        problems.append(Problem("tiny_patch_size", "not_divisible", text))
    return problems


def _std_problems(run: SupervisedRunConfig, needed: str) -> list[Problem]:
    """Settings of a standard deviation, where actions have none."""
    given = {name: getattr(run, name, None) for name in ("action_std", "action_std_init")}
    return [
        Problem(name, "needs_flag", f"--{name} {value}: the actions have no standard deviation; give {needed}")
        for name, value in given.items()
        if value is not None
    ]


def _new_tiny(
    folder: Path,
    demos: Demonstrations,
    run: SupervisedRunConfig,
    tiny: NewModelConfig,
    model_variant: str | None,
) -> None:
    from rlvla.models.vla.tiny import build_tiny

    with_proprio = run.use_proprio and demos.proprio is not None
    build_tiny(
        folder,
        sentences=sorted(set(demos.instructions)),
        dataset_statistics=demos.statistics,
        image_size=demos.images[0].shape[2],
        patch_size=tiny.tiny_patch_size,
        vision_dim=tiny.tiny_vision_dim,
        vision_depth=tiny.tiny_vision_depth,
        llm_dim=tiny.tiny_llm_dim,
        llm_mlp_dim=3 * tiny.tiny_llm_dim,
        llm_layers=tiny.tiny_llm_layers,
        model_variant=model_variant or "oft",
        action_chunk_len=None if model_variant == "autoregressive" else _chunk(tiny, demos),
        action_dim=demos.actions[0].shape[1],
        num_images_in_input=demos.images[0].shape[1],
        use_proprio=with_proprio,
        proprio_dim=demos.proprio[0].shape[1] if with_proprio and demos.proprio else None,
        center_crop=bool(run.center_crop),
        action_std=getattr(run, "action_std", None),
        action_std_init=getattr(run, "action_std_init", None),
        seed=run.seed,
    )
