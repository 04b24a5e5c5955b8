"""Describe a checkpoint folder without loading its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlvla.models.dataset_statistics import STATISTICS_FILE, value_problems
from rlvla.models.families import (
    check_checkpoint,
    check_memory,
    check_weight_files,
    checkpoint_overrides,
    policy_families,
    start_warnings,
    type_of,
)
from rlvla.models.stored_tensors import check_finite
from rlvla.models.vla.checkpoint import (
    check_tensors,
    complete_config,
    complete_tensors,
    read_config,
    read_statistics,
    shapes_of,
)
from rlvla.models.vla.checkpoint_files import FolderTensors, adapter_folder, find_tensors, lineage
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.family import OpenVLACheckpoint, head_warnings
from rlvla.models.vla.inputs import load_tokenizer
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.errors import ConfigError


@dataclass
class Description:
    """The result of `describe`.

    Attributes:
        path: the folder.
        facts: title -> value, in display order.
        problems: why the folder cannot be loaded; empty if it can.
        warnings: reasons why RL on tokens cannot start from a loadable folder.
    """

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def loadable(self) -> bool:
        """Whether the folder is a complete checkpoint."""
        return not self.problems

    @property
    def trainable(self) -> bool:
        """Whether reinforcement learning on action tokens can start from it."""
        return self.loadable and not self.warnings

    def __str__(self) -> str:
        width = max(map(len, self.facts), default=0)
        lines = [str(self.path), *(f"  {title:<{width}}  {value}" for title, value in self.facts.items())]
        verdict = "yes" if self.trainable else "no:"
        lines.append(f"can be trained: {verdict}")
        lines += [f"  - {text}" for text in [*self.problems, *self.warnings]]
        return "\n".join(lines)


def describe(path: str | Path, **overrides: Any) -> Description:
    """Inspect every file of a checkpoint folder; problems are reported in the result, not raised.

    Args:
        path: the folder.
        **overrides: settings that complete its config.json, as in `Actor.from_pretrained`.
    """
    folder = Path(path)
    described = Description(folder)
    try:
        if type_of(folder) in set(policy_families()) - {OpenVLAConfig.model_type}:
            return _of_another_family(described, overrides)
        check_weight_files(folder)
        raw, tensors = read_config(folder), find_tensors(folder)
        config, reason = complete_config(folder, raw, tensors, overrides)
        complete_tensors(folder, config, tensors, overrides)
        with torch.device("meta"):
            expected = shapes_of(OpenVLAForActionPrediction(config).state_dict())
    except ConfigError as error:
        described.problems += map(str, error.problems)
        return described
    described.facts = _facts(folder, config, reason, tensors)
    for check in (
        lambda: check_tensors(str(folder), expected, tensors.shapes),
        lambda: check_finite(folder, tensors),
        lambda: load_tokenizer(folder),
    ):
        try:
            check()
        except ConfigError as error:
            described.problems += map(str, error.problems)
    try:
        statistics = read_statistics(folder, raw)
        described.facts["statistics"] = ", ".join(sorted(statistics)) or "none"
        if not statistics:
            described.problems.append("there are no action statistics; copy the checkpoint's dataset_statistics.json")
        described.problems += [f"{folder / STATISTICS_FILE}: {text}" for text in value_problems(statistics)]
        if not described.problems:
            check_memory(OpenVLACheckpoint(folder, config, next(iter(statistics)), overrides))
    except ConfigError as error:
        described.problems += map(str, error.problems)
    if not config.has_regression_head:
        described.warnings += head_warnings(folder)
    return described


def _of_another_family(described: Description, overrides: Mapping[str, Any]) -> Description:
    """Facts from the family and its `PolicySpec`; ConfigError if the folder cannot be loaded."""
    folder = described.path
    checkpoint = check_checkpoint(folder, overrides=checkpoint_overrides(folder, SimpleNamespace(**overrides)))
    spec = checkpoint.spec
    described.facts = {
        "family": type_of(folder),
        "images": "as many as the environment shows" if spec.cameras is None else spec.cameras,
        "image size": "any" if spec.image_size is None else f"{spec.image_size} px",
        "proprio": f"{spec.proprio_dim} numbers" if spec.proprio_dim else "none",
        "actions": f"{spec.action_chunk_len} x {spec.action_dim} per decision, {spec.columns} log-probs",
        "without": ", ".join(sorted(spec.missing)) or "nothing",
        "statistics": checkpoint.unnorm_key or "none",
        **checkpoint.facts(),
    }
    described.warnings += start_warnings(folder, checkpoint)
    return described


def _facts(folder: Path, config: OpenVLAConfig, reason: str, tensors: FolderTensors) -> dict[str, Any]:
    towers = config.tower_configs()
    text = config.text_config
    adapter = adapter_folder(folder)
    parameters = sum(math.prod(shape) for shape in tensors.shapes.values())
    facts = {
        "variant": f"{config.model_variant} ({reason})",
        "parameters": f"{parameters:,}",
        "files": ", ".join(sorted({stored.path.name for stored in tensors.tensors.values()})),
        "vision": f"{config.image_size} px, {towers[0].num_patches} patches per image, towers "
        + " and ".join(f"{tower.embed_dim} x {tower.depth}" for tower in towers)
        + (", FiLM" if config.use_film else ""),
        "decoder": f"width {text.hidden_size}, {text.num_hidden_layers} layers, vocabulary {text.vocab_size}",
        "images": config.num_images_in_input or "as many as the environment shows",
        "proprio": f"{config.proprio_dim} numbers" if config.use_proprio else "none",
        "actions": f"{config.action_chunk_len} x {config.action_dim} per decision, normalised by "
        + {"q99": "1st to 99th percentile", "bounds": "minimum to maximum"}[config.action_normalization],
        "image treatment": f"{config.image_preprocessing}, centre crop {'on' if config.center_crop else 'off'}",
        "gripper": config.gripper_convention,
        "prompt": config.prompt_style,
    }
    if config.has_regression_head:
        facts["standard deviation"] = f"{config.action_std}, {config.action_std_init} at first"
        facts["noise correlation"] = str(config.action_noise_correlation)
    if adapter is not None:
        facts["adapter"] = (
            f"{adapter.name} on {lineage(folder)[1]}, {len(tensors.adapters)} layers, merged when loaded; --lora_rank "
            "trains new adapters"
        )
    return facts
