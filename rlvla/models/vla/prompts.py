"""Prompt templates and the text tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from rlvla.models.vla.checkpoint_files import find_file
from rlvla.utils.errors import ConfigError

PROMPT_TEMPLATE = "In: What action should the robot take to {instruction}?\nOut:"
# OpenVLA v0.1 was built on a chat model and keeps its system prompt (Vicuna v1.5).
VICUNA_TEMPLATE = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "USER: What action should the robot take to {instruction}? ASSISTANT:"
)
PROMPT_TEMPLATES = {"openvla": PROMPT_TEMPLATE, "vicuna": VICUNA_TEMPLATE}


def build_prompt(instruction: str, style: str = "openvla") -> str:
    """The prompt for an instruction, which is lowercased; `style` is a key of `PROMPT_TEMPLATES`."""
    return PROMPT_TEMPLATES[style].format(instruction=instruction.lower())


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The text tokenizer of a checkpoint folder, read from tokenizer.json without running code from the folder.

    Raises:
        ConfigError: the file is missing or not a tokenizer.
    """
    path = find_file(Path(folder), "tokenizer.json")
    if not path.is_file():
        raise ConfigError(f"{path} is missing; a checkpoint folder needs its tokenizer")
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{path} is not a readable tokenizer ({error}); copy the checkpoint again") from error
