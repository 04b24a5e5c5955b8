"""The head of the standard deviation, in a file beside a LeRobot policy that only rlvla reads."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from rlvla.models.lerobot.folder import tensor_problems
from rlvla.models.stored_tensors import read_head
from rlvla.models.value_models import scalar_head
from rlvla.utils.errors import ConfigError, Problem

STD_FILE = "flow_std.safetensors"


def std_problems(folder: Path, width: int, action_dim: int) -> list[Problem]:
    """What is wrong with the head in a folder, if there is one; arguments as for `load_std_head`."""
    try:
        load_std_head(folder, width, action_dim)
    except ConfigError as error:
        return error.problems
    return []


def load_std_head(folder: Path, width: int, action_dim: int) -> nn.Linear:
    """The head of a folder; without a file it starts at zero, in the middle of the range of `learned_std`.

    Args:
        folder: of the policy.
        width: of the expert's states, which it reads.
        action_dim: D, its outputs.

    Raises:
        ConfigError: a file that cannot be read, has tensors of other shapes, or NaN or infinity.
    """
    head, path = scalar_head(width, action_dim), folder / STD_FILE
    if not path.is_file():
        return head
    stored = read_head(path, remedy="use another copy, or delete it to start from the middle of the range")
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    problems = tensor_problems(path, wanted, {name: tuple(tensor.shape) for name, tensor in stored.items()})
    if problems:
        raise ConfigError(problems)
    head.load_state_dict(stored)
    return head
