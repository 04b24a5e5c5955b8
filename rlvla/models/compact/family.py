"""The family of compact policies (`model_type: compact`): checking and loading folders, building new policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file

from rlvla.models.compact.config import HEADS, MODEL_TYPE, CompactConfig
from rlvla.models.compact.policy import WEIGHTS_FILE, CompactPolicy, compact_codec, compact_row_tokens, compact_spec
from rlvla.models.compact.sketch import CompactRowShape, CompactSketch
from rlvla.models.compact.text import encode_sentence, stack_sentences
from rlvla.models.config import ActorConfig
from rlvla.models.dataset_statistics import STATISTICS_FILE, entry_problems, resolve_statistics_key
from rlvla.models.families import (
    CONFIG_FILE,
    SETTINGS,
    Checkpoint,
    PolicyFamily,
    RowShape,
    Sketch,
    register_policy_family,
    type_of,
)
from rlvla.models.flow.settings import ASKED_SCORES
from rlvla.models.policy import Policy
from rlvla.models.stored_tensors import read_tensors, stored_head_problems, tensor_problems
from rlvla.utils.data_files import check_types, read_json
from rlvla.utils.errors import ConfigError, Problem, collected

# Flags of `ActorConfig` that have no effect on compact networks.
COMPACT_UNREAD = ("train_expert_only", "gradient_checkpointing", "attn_implementation")
# Settings that change the tensors of the standard deviation.
_SETTINGS_OF_STD = {"action_std", "action_std_init", "flow_method"}


class CompactCheckpoint(Checkpoint):
    """A folder whose files have been checked.

    Args:
        folder: its path.
        config: its configuration.
        statistics: content of its dataset_statistics.json.
        unnorm_key: the entry in use.
        new_std: reset the standard deviation of the Gaussian head to that of `config`.
    """

    unread_options = COMPACT_UNREAD

    def __init__(
        self, folder: Path, config: CompactConfig, statistics: dict[str, Any], unnorm_key: str, *, new_std: bool
    ):
        self.folder, self.config, self.unnorm_key, self._new_std = folder, config, unnorm_key, new_std
        self.spec = compact_spec(config)
        self._statistics = statistics

    @property
    def largest_activation(self) -> int:
        """See `Checkpoint.largest_activation`."""
        return self.config.largest_activation

    def load_policy(self, config: ActorConfig | None = None, *, value_head: bool = False) -> Policy:
        """See `Checkpoint.load_policy`."""
        policy = CompactPolicy(self.config, self._statistics, self.unnorm_key, value_head=value_head)
        state = load_file(str(self.folder / WEIGHTS_FILE))
        if self._new_std:
            state.pop("action_std.log_std", None)
        names = policy.state_dict().keys()
        # Names and shapes were checked; missing and surplus tensors are those of the standard deviation.
        policy.load_state_dict({name: value for name, value in state.items() if name in names}, strict=False)
        policy.guidance = self.guidance
        if config is not None and config.freeze_vision_backbone:
            policy.network.cameras.requires_grad_(False)
        return policy

    def preparation_differences(self, other: Checkpoint) -> list[str]:
        """See `Checkpoint.preparation_differences`."""
        if not isinstance(other, CompactCheckpoint):
            return [f"policies of type {type_of(other.folder)}"]
        differences = [] if self.config.image_size == other.config.image_size else ["image_size"]
        if self.config.proprio_dim and other.config.proprio_dim:
            mine, theirs = (compact_codec(checkpoint.config, checkpoint.statistics) for checkpoint in (self, other))
            differences += [] if mine.normalizes_proprio_like(theirs) else ["proprio statistics"]
        return differences

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """See `Policy.row_tokens`."""
        return compact_row_tokens(self.config, instructions, num_images)

    def row_shape(self, instructions: Sequence[str], num_images: int) -> CompactRowShape:
        """See `Checkpoint.row_shape`."""
        encoded = [encode_sentence(sentence, self.config.text_buckets) for sentence in set(instructions)]
        sentences, length, features = stack_sentences(encoded).shape
        return CompactRowShape(num_images, length, sentences, features)

    def sketch(
        self, row: RowShape, config: ActorConfig, *, scalar_head: bool = False, supervised: bool = False
    ) -> Callable[[], Sketch]:
        """See `Checkpoint.sketch`."""
        assert isinstance(row, CompactRowShape)
        return partial(CompactSketch, self.config, row, config, scalar_head=scalar_head, supervised=supervised)

    @property
    def statistics(self) -> dict[str, Any]:
        """The entry in use."""
        return self._statistics[self.unnorm_key]

    def option_problems(self, config: ActorConfig) -> list[Problem]:
        """See `Checkpoint.option_problems`."""
        return compact_option_problems(config)

    def begin_supervised(self, policy: Policy, *, mean_alone: bool) -> None:
        """See `Checkpoint.begin_supervised`."""
        assert isinstance(policy, CompactPolicy)
        if mean_alone:
            policy.freeze_action_std()


def compact_option_problems(config: ActorConfig) -> list[Problem]:
    """Options of a run that compact networks do not support."""
    if not config.lora_rank:
        return []
    text = f"--lora_rank {config.lora_rank}: a compact policy is as small as the adapters of a VLA; leave it out"
    return [Problem("lora_rank", "mismatch", text)]


class CompactFamily(PolicyFamily):
    """Checks folders with config.json, dataset_statistics.json and model.safetensors."""

    condition = MappingProxyType({"advantage_condition": True})

    def check(
        self, folder: Path, *, unnorm_key: str | None, suite: str | None, overrides: Mapping[str, Any]
    ) -> CompactCheckpoint:
        """See `PolicyFamily.check`."""
        config = CompactConfig.from_json(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
        names = (*_settings(), ASKED_SCORES, *self.condition)
        changes = {name: overrides[name] for name in names if name in overrides}
        config, flag = replace(config, **changes), next(iter(changes), None)
        problems = [Problem(flag, "out_of_range", f"{folder}: {text}") for text in config.problems()]
        problems += config.flow.unread_problems(changes)
        if problems:
            raise ConfigError(problems)
        statistics, key = {}, ""
        try:
            statistics = read_json(folder / STATISTICS_FILE)
            check_types(statistics, dict.fromkeys(statistics, dict), folder / STATISTICS_FILE)
            key = resolve_statistics_key(statistics, unnorm_key or (suite if len(statistics) > 1 else None))
            dims = {"action": config.action_dim} | ({"proprio": config.proprio_dim} if config.proprio_dim else {})
            texts = entry_problems(statistics[key], dims)
            where = f"{folder / STATISTICS_FILE} ({key}): "
            low, high = ("q01", "q99") if config.action_normalization == "q99" else ("min", "max")
            if not texts:
                texts = [
                    f"{part}.{bound} is missing; config.json asks for {config.action_normalization}"
                    for part in dims
                    for bound in (low, high)
                    if statistics[key][part].get(bound) is None
                ]
            problems += [Problem("unnorm_key", "invalid_file", where + text) for text in texts]
        except ConfigError as error:
            problems += error.problems
        collected(problems, lambda: _check_weights(folder / WEIGHTS_FILE, config, overrides))
        if problems:
            raise ConfigError(problems)
        return CompactCheckpoint(folder, config, statistics, key, new_std="action_std_init" in overrides)

    def overrides(self, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `PolicyFamily.overrides`: the standard deviation of a Gaussian head and the settings of a flow."""
        head = str(read_json(folder / CONFIG_FILE).get("action_head"))
        names = HEADS.attribute(head, "settings") if head in HEADS.names() else ()
        changes = {name: settings[name] for name in names if settings.get(name) is not None}
        super().overrides(folder, {name: settings.get(name) for name in SETTINGS if name not in changes})
        scores = settings.get(ASKED_SCORES)
        return changes | ({ASKED_SCORES: scores} if head == "flow" and scores else {})


def _settings() -> list[str]:
    """Fields of the configuration that flags may change, for any head."""
    return [name for head in HEADS.names() for name in HEADS.attribute(head, "settings")]


def _check_weights(path: Path, config: CompactConfig, overrides: Mapping[str, Any]) -> None:
    """Check the tensors and the heads next to them; ConfigError lists all problems."""
    with torch.device("meta"):
        state = CompactPolicy(config, {"": {}}, "").state_dict()
    expected, stored = {name: tuple(tensor.shape) for name, tensor in state.items()}, read_tensors(path)
    # Flags may change what the standard deviation depends on, and reset its value.
    free = {"action_std.log_std"} if "action_std_init" in overrides else set()
    if "advantage_condition" in overrides:  # starts at 0, where the policy has none yet
        free.add("network.condition")
    if not _SETTINGS_OF_STD.isdisjoint(overrides):
        prefixes = ("action_std.", "velocity_network.std.")
        free |= {name for name in expected.keys() ^ stored.keys() if name.startswith(prefixes)}
    expected = {name: shape for name, shape in expected.items() if name not in free}
    stored = {name: tensor for name, tensor in stored.items() if name not in free}
    texts = tensor_problems(stored, expected, MODEL_TYPE)
    problems = [Problem(None, "invalid_file", f"{path}: {text}") for text in texts] + stored_head_problems(path.parent)
    if problems:
        raise ConfigError(problems)


def build_compact(
    folder: str | Path, config: CompactConfig, dataset_statistics: Mapping[str, Any], *, seed: int = 0
) -> Path:
    """Write a new policy with random weights and return its folder; the same arguments give identical files.

    Raises:
        ConfigError: sizes that no network can have.
    """
    problems = [Problem(None, "out_of_range", text) for text in config.problems()]
    if problems:
        raise ConfigError(problems)
    policy = CompactPolicy(config, dataset_statistics, next(iter(dataset_statistics)))
    policy.initialize(seed)
    policy.save_pretrained(folder)
    return Path(folder)


register_policy_family(MODEL_TYPE, CompactFamily())
