"""The files of a regression head: `action_head--{step}_checkpoint.pt` of OpenVLA-OFT, and `action_std.safetensors`.

The second is specific to this package (OFT's actions are deterministic); a folder without it uses `action_std_init`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn import Linear

from rlvla.models.vla.checkpoint_files import (
    ACTION_STD_FILE,
    HEAD_PATTERNS,
    FolderTensors,
    Stored,
    lineage,
    safetensors_header,
    torch_file,
)
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.regression_head import ActionStd, RegressionHead
from rlvla.utils.errors import ConfigError

HEAD_PREFIX, STD_PREFIX = "action_head.", "action_std."
HEAD_FILE = "action_head--0_checkpoint.pt"
# OFT saves the head with the prefix of its distributed wrapper.
WRAPPER = "module."


def add_head(
    found: FolderTensors, folder: Path, config: OpenVLAConfig, *, create: bool = False, reset_std: bool = False
) -> None:
    """Add the head and the standard deviation to the tensors of a folder, under their names in the model.

    Args:
        found: the folder's other tensors; extended in place.
        folder: the checkpoint.
        config: configuration of its model.
        create: create a new head if there is none.
        reset_std: start at `action_std_init` even if the folder has a standard deviation.

    Raises:
        ConfigError: no head, several heads, a diffusion head, or an unreadable file.
    """
    path = head_file(folder)
    if path is not None:
        stored = _stored_head(path)
    elif create:
        stored = _new_head(config)
    else:
        raise ConfigError(
            f"{folder} has no regression head ({HEAD_PATTERNS[0]}), which --model_variant {config.model_variant} "
            "needs; fine-tune it first (cli/train_sft_vla.py makes a new head) or choose another variant"
        )
    _add(found, path.name if path else HEAD_FILE, stored)
    _add(found, ACTION_STD_FILE, _action_std(folder, config, reset_std))


def head_file(folder: Path) -> Path | None:
    """The regression head file of the folder or of its adapter's base model; None if there is none.

    Raises:
        ConfigError: there are several, or it is a diffusion head.
    """
    for place in lineage(folder):
        diffusion = sorted(place.glob(HEAD_PATTERNS[1]))
        if diffusion:
            raise ConfigError(
                f"{diffusion[0]}: the actions of this checkpoint come from a diffusion head, not from L1 regression; "
                "only regression heads can be trained here"
            )
        paths = sorted(place.glob(HEAD_PATTERNS[0]))
        if len(paths) > 1:
            raise ConfigError(f"{place} has several regression heads {[p.name for p in paths]}; keep one")
        if paths:
            return paths[0]
    return None


def with_head_files(separate: dict[str, dict[str, str]], names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Separate file -> name in the model -> name in the file, completed for a newly created head.

    Args:
        separate: the known files.
        names: names of all tensors of the model.
    """
    known = {name for files in separate.values() for name in files}
    head = {name: WRAPPER + name.removeprefix(HEAD_PREFIX) for name in names if name.startswith(HEAD_PREFIX)}
    std = {name: name.removeprefix(STD_PREFIX) for name in names if name.startswith(STD_PREFIX)}
    fresh = {HEAD_FILE: head, ACTION_STD_FILE: std}
    return separate | {file: files for file, files in fresh.items() if files and not files.keys() & known}


def _add(found: FolderTensors, file: str, stored: dict[str, Stored]) -> None:
    found.tensors.update(stored)
    found.separate[file] = {name: tensor.key for name, tensor in stored.items()}


def _stored_head(path: Path) -> dict[str, Stored]:
    content = torch_file(path)
    stored = {
        HEAD_PREFIX + key.removeprefix(WRAPPER): Stored(path, key, tuple(value.shape), value)
        for key, value in content.items()
    }
    if f"{HEAD_PREFIX}model.fc1.weight" not in stored:
        raise ConfigError(
            f"{path} is not an L1 regression head of OpenVLA-OFT: it has no model.fc1.weight but {sorted(content)[:3]}"
        )
    return stored


def _new_head(config: OpenVLAConfig) -> dict[str, Stored]:
    """Random weights, the same for the same sizes; see `initialize_head`."""
    head = RegressionHead(config.text_config.hidden_size, config.action_dim)
    initialize_head(head, torch.Generator().manual_seed(0))
    return {
        HEAD_PREFIX + name: Stored(Path("(new)"), WRAPPER + name, tuple(value.shape), value)
        for name, value in head.state_dict().items()
    }


@torch.no_grad()
def initialize_head(head: RegressionHead, generator: torch.Generator) -> None:
    """Xavier weights and zero biases; the last layer is scaled by 0.1 so that actions start near 0."""
    for module in head.modules():
        if isinstance(module, Linear):
            torch.nn.init.xavier_uniform_(module.weight, generator=generator)
            module.bias.zero_()
    head.model.fc2.weight.mul_(0.1)


def _action_std(folder: Path, config: OpenVLAConfig, reset: bool) -> dict[str, Stored]:
    """The stored standard deviation, or a new one at `action_std_init`; tensors missing from the file are new."""
    fresh = ActionStd(config.action_std, config.text_config.hidden_size, config.action_dim, config.action_std_init)
    path = next((p / ACTION_STD_FILE for p in lineage(folder) if (p / ACTION_STD_FILE).is_file()), None)
    kept = {} if path is None or reset else dict(safetensors_header(path))
    stored = {}
    for key, value in fresh.state_dict().items():
        if key in kept and path is not None:
            stored[STD_PREFIX + key] = Stored(path, key, kept[key])
        else:
            stored[STD_PREFIX + key] = Stored(Path("(new)"), key, tuple(value.shape), value)
    return stored
