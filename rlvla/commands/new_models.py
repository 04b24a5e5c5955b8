"""Building a new small policy to start from: `--pretrain tiny` or `--pretrain compact`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlvla.data.demonstrations import Demonstrations
from rlvla.envs.registry import Suite, get_suite, is_known
from rlvla.models.action_heads import missing_of
from rlvla.models.compact.config import HEADS, CompactConfig, layers_for
from rlvla.models.compact.family import COMPACT_UNREAD, build_compact, compact_option_problems
from rlvla.models.config import ActorConfig
from rlvla.models.dataset_statistics import with_full_ranges
from rlvla.models.families import Checkpoint, unread_option_problems
from rlvla.models.flow.head import MISSING_OF_FLOWS
from rlvla.models.lerobot.family import LeRobotCheckpoint
from rlvla.models.lerobot.new import (
    TINY_FAMILIES,
    NewPolicyFacts,
    NewPolicySizes,
    build_new_policy,
    new_policy_problems,
)
from rlvla.models.lerobot.settings import camera_problems, platform_problems, read_camera_map
from rlvla.models.vla.choices import REGRESSION
from rlvla.trainer.supervised.config import NEW_MODELS, NewModelConfig, SFTRunConfig, SupervisedRunConfig
from rlvla.utils.errors import Problem

_UNREAD = {  # kind of new model -> flags of `ActorConfig` without effect
    "tiny": Checkpoint.unread_options,
    "compact": COMPACT_UNREAD,
    "lerobot": ("lora_rank", *LeRobotCheckpoint.unread_options),
}
# Default sizes of a tiny model on action tokens.
_TINY = {"patch_size": 8, "vision_dim": 48, "vision_depth": 3, "llm_dim": 64, "llm_layers": 3}


def is_new(pretrain: str) -> bool:
    """Whether `--pretrain` names a kind of new model rather than a folder."""
    return pretrain in NEW_MODELS


def new_model_problems(
    run: SupervisedRunConfig,
    sizes: NewModelConfig,
    demos: Demonstrations | None,
    actor: ActorConfig | None = None,
    given: Collection[str] = (),
) -> list[Problem]:
    """Problems of the sizes of a new model, of its fit to the demonstrations and of options of the policy.

    Args:
        run: data and kind of the model.
        sizes: its sizes.
        demos: the demonstrations; None: unreadable, which is reported elsewhere.
        actor: options of a policy; None: the model is none.
        given: names of the flags on the command line.
    """
    family = _new_family(run, sizes)
    if family == "lerobot":
        problems = [*_lerobot_problems(run, sizes, demos, actor)]
    else:
        problems = [*(_tiny_problems if run.pretrain == "tiny" else _compact_problems)(run, sizes, demos)]
    if actor is not None:
        kind = sizes.model_family if family == "lerobot" else run.pretrain
        problems += unread_option_problems(_UNREAD[family], f"new {kind}", actor, given)
        problems += compact_option_problems(actor) if family == "compact" else []
    return problems if demos is None else problems + unnorm_key_problems(run, demos)


def unnorm_key_problems(run: SupervisedRunConfig, demos: Demonstrations) -> list[Problem]:
    """A key that names no entry of the demonstrations' statistics."""
    if run.unnorm_key is None or run.unnorm_key in demos.statistics:
        return []
    text = f"--unnorm_key {run.unnorm_key}: {run.demos[0]} has statistics for {', '.join(sorted(demos.statistics))}"
    return [Problem("unnorm_key", "unknown_name", text)]


def missing_of_new(run: SFTRunConfig, sizes: NewModelConfig) -> Mapping[str, str]:
    """Quantities that a new model does not have, see `PolicySpec.missing`."""
    family = _new_family(run, sizes)
    if family == "lerobot":
        return MISSING_OF_FLOWS
    return missing_of(run.model_variant) if family == "tiny" else HEADS.get(sizes.compact_head).missing


def new_model(
    folder: Path,
    demos: Demonstrations,
    run: SupervisedRunConfig,
    sizes: NewModelConfig,
    model_variant: str | None = None,
) -> None:
    """Build a new model that fits the demonstrations; `model_variant` of a tiny one defaults to oft."""
    family = _new_family(run, sizes)
    if family == "lerobot":
        facts = lerobot_facts(demos, run, sizes)
        build_new_policy(sizes.model_family, folder, facts, NewPolicySizes(**_tiny_sizes(sizes)), seed=run.seed)
    elif family == "tiny":
        _new_tiny(folder, demos, run, sizes, model_variant)
    else:
        build_compact(folder, _compact_config(demos, run, sizes), demos.statistics, seed=run.seed)


def _new_family(run: SupervisedRunConfig, sizes: NewModelConfig) -> str:
    """Kind of the new model: compact, tiny (on action tokens), or lerobot (in LeRobot's format)."""
    return "lerobot" if run.pretrain == "tiny" and sizes.model_family != TINY_FAMILIES[0] else run.pretrain


def _tiny_sizes(sizes: NewModelConfig, defaults: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """The sizes of a tiny model, without the prefix `tiny_`."""
    names = (f.name for f in fields(NewPolicySizes))
    return {n: defaults.get(n) if (value := getattr(sizes, f"tiny_{n}")) is None else value for n in names}


def new_chunk_len(sizes: NewModelConfig, demos: Demonstrations) -> int:
    """Actions per decision of a new model, by default as the suite of the demonstrations has it."""
    suite = str(demos.env_args.get("task_suite_name"))
    return sizes.action_chunk_len or (get_suite(suite).chunk if is_known(suite) else Suite.chunk)


def lerobot_facts(demos: Demonstrations, run: SupervisedRunConfig, sizes: NewModelConfig) -> NewPolicyFacts:
    """Facts of demonstrations with proprioception that a LeRobot policy must fit."""
    suite, proprio = str(demos.env_args.get("task_suite_name")), demos.proprio
    key = run.unnorm_key or (suite if suite in demos.statistics else next(iter(demos.statistics)))
    assert proprio is not None
    return NewPolicyFacts(
        sentences=demos.distinct_instructions,
        statistics=with_full_ranges(demos.statistics[key]),
        unnorm_key=key,
        cameras=tuple(run.cameras or demos.env_args["cameras"]),
        image_shape=demos.image_shape,
        chunk_len=new_chunk_len(sizes, demos),
        state_dim=proprio[0].shape[1],
        action_dim=demos.actions[0].shape[1],
        camera_map=read_camera_map(run.camera_map)[0],
    )


def camera_map_problems(run: SupervisedRunConfig, demos: Demonstrations) -> list[Problem]:
    """Entries of --camera_map that are malformed, or do not name each camera of the demonstrations once."""
    mapping, problems = read_camera_map(run.camera_map)
    if mapping and not problems:
        problems = camera_problems(mapping, run.cameras or demos.env_args["cameras"], list(mapping.values()))
    return problems


def _lerobot_problems(
    run: SupervisedRunConfig, sizes: NewModelConfig, demos: Demonstrations | None, actor: ActorConfig | None
) -> Iterator[Problem]:
    family = sizes.model_family
    yield from new_policy_problems(family, NewPolicySizes(**_tiny_sizes(sizes)), actor)
    yield from platform_problems(run.platform)
    yield from camera_map_problems(run, demos) if demos is not None else ()
    if not run.use_proprio:
        text = f"--no-use_proprio: a {family} policy reads the robot's state; leave it out"
        yield Problem("use_proprio", "no_state", text)
    elif demos is not None and demos.proprio is None:
        text = f"--demos {' '.join(run.demos)} has no proprioception, which a {family} policy reads"
        yield Problem("demos", "no_state", text)


def _compact_config(demos: Demonstrations, run: SupervisedRunConfig, sizes: NewModelConfig) -> CompactConfig:
    size, channels = demos.images[0].shape[2], tuple(sizes.compact_channels)
    kernels, strides = layers_for(size, len(channels))
    given = {name: getattr(run, name, None) for name in ("action_std", "action_std_init")}
    return CompactConfig(
        image_size=size,
        num_images_in_input=demos.images[0].shape[1],
        proprio_dim=demos.proprio[0].shape[1] if run.use_proprio and demos.proprio is not None else 0,
        action_dim=demos.actions[0].shape[1],
        action_chunk_len=new_chunk_len(sizes, demos),
        action_head=sizes.compact_head,
        head=sizes.head_options,
        channels=channels,
        kernels=kernels,
        strides=strides,
        width=sizes.compact_width,
        action_normalization=_normalization(next(iter(demos.statistics.values()))["action"]),
        **{name: value for name, value in given.items() if value is not None},
    )


def _normalization(actions: Mapping[str, Any]) -> str:
    """Range of normalization: "bounds" if quantiles hide rare actions, such as pulses of a gripper; else "q99"."""
    ranges = zip(actions["q01"], actions["q99"], actions["min"], actions["max"])
    return "bounds" if any(low == high and least < most for low, high, least, most in ranges) else "q99"


def _compact_problems(run: SupervisedRunConfig, sizes: NewModelConfig, demos: Demonstrations | None) -> list[Problem]:
    has_std = "action_std" in HEADS.attribute(sizes.compact_head, "settings")
    problems = [] if has_std else _std_problems(run, "--compact_head gaussian")
    problems += not_square_problems(demos, " ".join(run.demos), "a compact policy")
    if demos is not None and not problems:
        problems += [Problem(None, "out_of_range", text) for text in _compact_config(demos, run, sizes).problems()]
    return problems


def _tiny_problems(run: SupervisedRunConfig, tiny: NewModelConfig, demos: Demonstrations | None) -> Iterator[Problem]:
    from rlvla.models.vla.tiny import LLM_HEAD_WIDTH, default_heads

    sizes, variant = _tiny_sizes(tiny, _TINY), getattr(run, "model_variant", None)
    vision, width, patch = sizes["vision_dim"], sizes["llm_dim"], sizes["patch_size"]
    if vision % 4:
        yield Problem("tiny_vision_dim", "not_divisible", f"--tiny_vision_dim {vision} must be a multiple of 4")
    heads = default_heads(max(1, width), LLM_HEAD_WIDTH)
    if width // heads % 2:  # rotary embeddings rotate pairs of channels
        text = f"--tiny_llm_dim {width} gives {heads} head(s) of odd width; take a multiple of {LLM_HEAD_WIDTH}"
        yield Problem("tiny_llm_dim", "not_divisible", text)
    if variant == "autoregressive" and tiny.action_chunk_len not in (None, 1):
        text = f"--action_chunk_len {tiny.action_chunk_len}: an autoregressive model predicts one action; leave it out"
        yield Problem("action_chunk_len", "contradiction", text)
    if variant != REGRESSION:
        yield from _std_problems(run, f"--model_variant {REGRESSION}")
    yield from not_square_problems(demos, " ".join(run.demos), "a tiny policy on action tokens")
    pixels = 0 if demos is None else demos.images[0].shape[2]
    if patch > 0 and pixels % patch:
        text = f"--tiny_patch_size {patch} must divide the image size {pixels}"
        yield Problem("tiny_patch_size", "not_divisible", text)


def not_square_problems(demos: Demonstrations | None, path: str, policy: str) -> list[Problem]:
    """Images that are not square, of a policy that does not pad them."""
    if demos is None or len(set(demos.image_shape)) == 1:
        return []
    shape = "{}x{}".format(*demos.image_shape)
    text = f"{path} has images of {shape} pixels, and {policy} reads squares"
    return [Problem("demos", "image_size", f"{text}: give --image_size N --image_fit crop, pad or stretch")]


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

    with_proprio, sizes = run.use_proprio and demos.proprio is not None, _tiny_sizes(tiny, _TINY)
    build_tiny(
        folder,
        sentences=demos.distinct_instructions,
        dataset_statistics={key: with_full_ranges(entry) for key, entry in demos.statistics.items()},
        image_size=demos.images[0].shape[2],
        llm_mlp_dim=3 * sizes["llm_dim"],
        **sizes,
        model_variant=model_variant or "oft",
        action_chunk_len=None if model_variant == "autoregressive" else new_chunk_len(tiny, demos),
        action_dim=demos.actions[0].shape[1],
        num_images_in_input=demos.images[0].shape[1],
        use_proprio=with_proprio,
        proprio_dim=demos.proprio[0].shape[1] if with_proprio and demos.proprio else None,
        center_crop=bool(run.center_crop),
        action_std=getattr(run, "action_std", None),
        action_std_init=getattr(run, "action_std_init", None),
        seed=run.seed,
    )
