"""The family of OpenVLA checkpoints (`model_type: openvla`), in the public layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from rlvla.experience import Experience
from rlvla.models.actor import Actor, ActorCritic, policy_spec
from rlvla.models.config import ActorConfig
from rlvla.models.dataset_statistics import STATISTICS_FILE, entry_problems, resolve_statistics_key
from rlvla.models.families import (
    SETTINGS,
    TEXT_CONDITION,
    Checkpoint,
    PolicyFamily,
    RowShape,
    Sketch,
    register_policy_family,
    type_of,
)
from rlvla.models.flow.settings import FLOW_SETTINGS
from rlvla.models.lora import lora_layers
from rlvla.models.policy import Policy
from rlvla.models.value_models import Critic, RewardModel, load_openvla_return_model
from rlvla.models.vla.checkpoint import check_weights, read_config, read_statistics
from rlvla.models.vla.checkpoint_files import action_heads
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.decoder import require_flash_attention
from rlvla.models.vla.inputs import VLAInputs, load_tokenizer, row_tokens
from rlvla.models.vla.normalization import BOUND_KEYS
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.sketch import OpenVLASketch
from rlvla.utils.data_files import check_types
from rlvla.utils.errors import ConfigError, Problem, collected

# Action tokens with at least this fraction of the entropy of a uniform distribution are considered random.
UNIFORM_SHARE = 0.99
# Settings of other families.
_UNSUPPORTED = (*FLOW_SETTINGS, "camera_map", "critic_features")


def head_warnings(folder: Path) -> list[str]:
    """Warning of a regression head next to the weights: the policy was not trained to emit action tokens."""
    return [
        f"{folder} holds {path.name}: its actions come from that regression head, and its action tokens mean "
        "nothing (about 0 % success). Train that head (--model_variant oft_regression), or fine-tune on tokens first "
        "(cli/train_sft_vla.py)"
        for path in action_heads(folder)[:1]
    ]


class OpenVLACheckpoint(Checkpoint):
    """A folder in the public layout whose files have been checked.

    Args:
        folder: its path.
        config: its configuration, completed.
        unnorm_key: resolved statistics key.
        overrides: settings that override its config.json.
    """

    def __init__(self, folder: Path, config: OpenVLAConfig, unnorm_key: str, overrides: Mapping[str, Any]):
        self.folder, self.config, self.unnorm_key = folder, config, unnorm_key
        self.spec = policy_spec(config)
        self._overrides = dict(overrides)

    @cached_property
    def inputs(self) -> VLAInputs:
        """Turns observations into model inputs."""
        return VLAInputs.from_pretrained(self.folder, config=self.config, unnorm_key=self.unnorm_key)

    def load_policy(self, config: ActorConfig | None = None, *, value_head: bool = False) -> Policy:
        """See `Checkpoint.load_policy`."""
        kind = ActorCritic if value_head else Actor
        policy = kind.from_pretrained(self.folder, config, self.unnorm_key, **self._overrides)
        policy.guidance = self.guidance
        return policy

    def load_critic(self, config: ActorConfig | None = None) -> Critic:
        """See `Checkpoint.load_critic`."""
        return Critic.from_pretrained(self.folder, self.unnorm_key, config, **self._overrides)

    def load_reward_model(self, config: ActorConfig | None = None, *, new: bool = False) -> RewardModel:
        """See `Checkpoint.load_reward_model`."""
        if new:
            return RewardModel.from_policy(self.folder, self.unnorm_key, **self._overrides)
        return RewardModel.from_pretrained(self.folder, self.unnorm_key, config, **self._overrides)

    def load_return_model(self, *, new: bool = False, action_values: bool = False) -> Any:
        """See `Checkpoint.load_return_model`."""
        options = {"new": new, "action_values": action_values}
        return load_openvla_return_model(self.folder, self.unnorm_key, **options, **self._overrides)

    def preparation_differences(self, other: Checkpoint) -> list[str]:
        """See `Checkpoint.preparation_differences`."""
        if not isinstance(other, OpenVLACheckpoint):
            return [f"policies of type {type_of(other.folder)}"]
        mine, theirs = self.config, other.config
        names = ("image_preprocessing", "center_crop", "image_size")
        differences = [name for name in names if getattr(mine, name) != getattr(theirs, name)]
        if mine.use_proprio and theirs.use_proprio and not self.inputs.normalizes_proprio_like(other.inputs):
            differences.append("proprio statistics")
        return differences

    def option_problems(self, config: ActorConfig) -> list[Problem]:
        """LoRA targets that match no layer, and an attention kernel that is not installed."""
        problems: list[Problem] = []
        try:
            if config.attn_implementation != "sdpa":
                require_flash_attention()
            if config.lora_rank:
                with torch.device("meta"):
                    vla = OpenVLAForActionPrediction(self.config)
                lora_layers(vla, config.lora_targets, vision=not config.freeze_vision_backbone)
        except ConfigError as error:
            problems += error.problems
        return problems

    def check_decisions(self, policy: Policy, batch: Experience) -> None:
        """Raise ConfigError if the action tokens are as good as random, e.g. trained with a regression head."""
        if self.config.has_regression_head:
            return
        share = entropy_share(policy, batch, self.config.n_action_bins)
        if share >= UNIFORM_SHARE:
            raise ConfigError(
                f"the action tokens of this checkpoint are as good as random: their entropy is {100 * share:.1f} % of "
                "the uniform distribution's. It was trained with a regression head, or for another --model_variant; "
                "fine-tune it on tokens first (cli/train_sft_vla.py)"
            )

    def begin_supervised(self, policy: Policy, *, mean_alone: bool) -> None:
        """See `Checkpoint.begin_supervised`; regression heads next to the weights will not be saved."""
        assert isinstance(policy, Actor)
        policy.forget_action_heads()
        if mean_alone:
            policy.freeze_action_std()

    def row_shape(self, instructions: Sequence[str], num_images: int) -> RowShape:
        """See `Checkpoint.row_shape`."""
        return RowShape(num_images, self.inputs.prompt(list(instructions), torch.device("cpu"))[0].shape[1])

    @property
    def largest_activation(self) -> int:
        """See `Checkpoint.largest_activation`."""
        return self.config.largest_activation

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """See `Policy.row_tokens`."""
        return row_tokens(self.inputs, instructions, num_images)

    def sketch(
        self, row: RowShape, config: ActorConfig, *, scalar_head: bool = False, supervised: bool = False
    ) -> Callable[[], Sketch]:
        """See `Checkpoint.sketch`."""
        return partial(OpenVLASketch, self.config, row, config, scalar_head=scalar_head)


class OpenVLAFamily(PolicyFamily):
    """Checks folders in the public layout."""

    condition = TEXT_CONDITION

    def check(
        self, folder: Path, *, unnorm_key: str | None, suite: str | None, overrides: Mapping[str, Any]
    ) -> OpenVLACheckpoint:
        """See `PolicyFamily.check`."""
        raw = read_config(folder)  # nothing else can be checked without it
        problems: list[Problem] = []
        config = collected(problems, lambda: check_weights(OpenVLAForActionPrediction, folder, raw, dict(overrides)))
        collected(problems, lambda: load_tokenizer(folder))
        key = ""
        try:
            statistics = read_statistics(folder, raw)
            check_types(statistics, dict.fromkeys(statistics, dict), f"{folder}: the statistics")
            key = resolve_statistics_key(statistics, unnorm_key or (suite if len(statistics) > 1 else None))
            if config is not None:
                mismatches = statistics_problems(config, statistics[key])
                problems += [p.prefixed(f"{folder} ({key}): ") for p in mismatches]
        except ConfigError as error:
            problems += [p.prefixed(f"{folder}: ") for p in error.problems]
        if problems or config is None:
            raise ConfigError(problems)
        return OpenVLACheckpoint(folder, config, key, overrides)

    def overrides(self, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `PolicyFamily.overrides`."""
        super().overrides(folder, {name: settings.get(name) for name in _UNSUPPORTED})
        recorded = {name: settings.get(name) for name in SETTINGS if name not in _UNSUPPORTED}
        # A chunk length completes a public config.json without one, but never overrides an existing value.
        if settings.get("action_chunk_len") is not None and read_config(folder).get("action_chunk_len") is None:
            recorded["action_chunk_len"] = settings["action_chunk_len"]
        return {name: value for name, value in recorded.items() if value is not None}

    def warnings(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """See `PolicyFamily.warnings`."""
        if isinstance(checkpoint, OpenVLACheckpoint) and checkpoint.config.has_regression_head:
            return []
        return head_warnings(folder)


def statistics_problems(config: OpenVLAConfig, statistics: Any) -> list[Problem]:
    """Statistics without the range that the model needs or of other dimensions, and values that are not finite."""
    problems = []
    sizes = {"action": config.action_dim} | ({"proprio": config.proprio_width} if config.use_proprio else {})
    for entry, dims in sizes.items():
        ranges = statistics.get(entry) if isinstance(statistics, dict) else None
        lists = ranges if isinstance(ranges, dict) else {}
        lengths = {len(v) for k, v in lists.items() if k in ("q01", "q99", "min", "max") and isinstance(v, list)}
        missing = [bound for bound in BOUND_KEYS[config.action_normalization] if bound not in lists]
        if lengths == {dims} and missing:
            text = f"the {entry} statistics lack {', '.join(missing)}, and config.json asks for "
            text += f"{config.action_normalization}; choose another --unnorm_key, or complete {STATISTICS_FILE}"
            problems.append(Problem("unnorm_key", "invalid_file", text))
        elif lengths == {dims}:
            texts = entry_problems(statistics, {entry: dims})
            problems += [Problem("unnorm_key", "invalid_file", f"{STATISTICS_FILE}: {text}") for text in texts]
        else:
            has = f"have {sorted(lengths)} dimensions" if lengths else "are missing"
            text = f"the {entry} statistics {has}, but the model's {entry} has {dims}; choose another --unnorm_key"
            problems.append(Problem("unnorm_key", "mismatch", text))
    return problems


@torch.no_grad()
def entropy_share(policy: Policy, batch: Experience, bins: int) -> float:
    """Mean entropy of the action tokens on prepared observations, as a fraction of the uniform distribution's."""
    rows = batch.with_fields(trace={"tokens": torch.zeros(len(batch), policy.spec.columns, dtype=torch.int64)})
    entropy = policy.forward(**policy.score(rows, 1.0), wants=("entropy",))["entropy"]
    return float(entropy[:, policy.effective_columns.to(entropy.device)].mean()) / math.log(bins)


register_policy_family("openvla", OpenVLAFamily())
