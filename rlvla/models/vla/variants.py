"""Detects from its files which kind of decoding a checkpoint was trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlvla.models.vla.checkpoint_files import PROPRIO_PREFIX, FolderTensors, action_heads
from rlvla.models.vla.choices import REGRESSION
from rlvla.utils.errors import ConfigError

# Public folders include their training code. It is read as text, never run: parallel decoding mentions chunks.
CODE_FILE = "modeling_prismatic.py"
CHUNK_MARK = "ACTIONS_CHUNK"


def detect_variant(folder: Path, raw: dict[str, Any], found: FolderTensors, asked: str | None) -> tuple[str, str]:
    """The model variant and the reason for it.

    Args:
        folder: the checkpoint.
        raw: content of its config.json.
        found: its tensors.
        asked: the variant requested by the caller, or None.

    Raises:
        ConfigError: the caller and config.json contradict each other.
    """
    told = raw.get("model_variant")
    if told == "oft" and asked == REGRESSION:  # another head on the same backbone; whether it exists is checked later
        return asked, "given by the caller"
    if told is not None and asked not in (None, told):
        raise ConfigError(f"model_variant {asked!r} contradicts {folder / 'config.json'}, which says {told!r}")
    if told is not None:
        return told, "config.json says so"
    if asked is not None:
        return asked, "given by the caller"
    parts = [*found.separate, *(path.name for path in action_heads(folder))]
    if parts:
        return "oft", f"the folder holds {parts[0]}"
    if any(name.startswith(PROPRIO_PREFIX) for name in found.tensors):
        return "oft", "the weights hold a proprio projector"
    code = folder / CODE_FILE
    if code.is_file():
        if CHUNK_MARK in code.read_text(encoding="utf-8", errors="replace"):
            return "oft", f"{CODE_FILE} in the folder decodes chunks"
        return "autoregressive", f"{CODE_FILE} in the folder knows no chunks"
    if any(str(value).startswith("openvla/openvla-") for value in (raw.get("auto_map") or {}).values()):
        return "autoregressive", "auto_map points to the code of plain OpenVLA"
    return "oft", "assumed: nothing in the folder tells (model_variant says it)"
