"""The prompts of pi0 and pi0.5, and where the tokenizer comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlvla.models.lerobot.processors import PREPROCESSOR
from rlvla.models.lerobot.prompts import TOKENIZER_FILES, find_folder

PALIGEMMA = "google/paligemma-3b-pt-224"  # its tokenizer; the weights are not needed
BINS = 256


def state_in_bins(states: np.ndarray, size: int) -> np.ndarray:
    """Normalized states [B, P] -> bins [B, size] of equal width over [-1, 1], padded with the bin of 0.

    A number below -1 gives -1, one above 1 the last bin, as in LeRobot.
    """
    padded = np.pad(states, ((0, 0), (0, max(0, size - states.shape[1]))))
    return np.digitize(padded, np.linspace(-1, 1, BINS + 1)[:-1]) - 1


def prompts_with_states(instructions: Sequence[str], states: np.ndarray, size: int) -> list[str]:
    """The prompts of pi0.5, for normalized states [B, P] that are padded to `size` numbers."""
    texts = (instruction.strip().replace("_", " ").replace("\n", " ") for instruction in instructions)
    rows = (" ".join(map(str, row)) for row in state_in_bins(states, size).tolist())
    return [f"Task: {text}, State: {row};\nAction: " for text, row in zip(texts, rows, strict=True)]


def find_tokenizer(name: str, policy_folder: Path) -> Path:
    """The local folder of the tokenizer that the pipeline names; see `find_folder`."""
    setting = f"{PREPROCESSOR}: tokenizer_name"
    return find_folder(name, policy_folder, TOKENIZER_FILES[0], setting=setting, files=TOKENIZER_FILES)
