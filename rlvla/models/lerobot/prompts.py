"""Prompts of LeRobot's policies: lookup of their tokenizers, and tokenization."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rlvla.utils.data_files import admit
from rlvla.utils.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PADDINGS = ("longest", "max_length")  # to the longest of the batch, or to the length in the settings
_CACHED = 4096  # tokenized prompts; those that contain a state are all different


def with_new_line(instruction: str) -> str:
    """The prompt of SmolVLA and pi0."""
    return instruction if instruction.endswith("\n") else f"{instruction}\n"


def find_folder(name: str, policy_folder: Path, file: str, *, setting: str, files: Sequence[str]) -> Path:
    """Local folder of a model under the name in a policy's folder; nothing is downloaded.

    The name may be a path (absolute, or relative to the policy's folder) or a public name, which is looked up in the
    local cache of Hugging Face.

    Args:
        name: of the model.
        policy_folder: of the policy.
        file: one that a folder in the cache must have.
        setting: file and entry of the policy with the name, for the message.
        files: required files, for the message.

    Raises:
        ConfigError: it is missing; the message has the command that fetches it.
    """
    folder = policy_folder / name
    if folder.is_dir():
        admit(folder, below=False)
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return Path(cached).parent
    fetch = f"hf download {name} {' '.join(files)} --local-dir {folder}"
    remedy = f"copy it to {folder}" if Path(name).is_absolute() else f"fetch it ({fetch}), or name a folder"
    where = f"{policy_folder}/{setting} {name!r} is not on this machine"
    needed = f"{', '.join(files[:-1])} and {files[-1]}"
    raise ConfigError.of(None, "missing_file", f"{where}; its {needed} are needed: {remedy}")


def inner_folders(names: Iterable[object], policy_folder: Path) -> list[str]:
    """Names of folders inside the policy's folder, which belong to it."""
    inner = {os.path.normpath(name) for name in names if isinstance(name, str) and not Path(name).is_absolute()}
    return sorted(name for name in inner if not _leaves(name) and name != "." and (policy_folder / name).is_dir())


def lasting_name(name: str, policy_folder: Path) -> str:
    """A name that stays valid in a copy of the policy: absolute for a folder outside the policy's."""
    if _leaves(os.path.normpath(name)) and (policy_folder / name).is_dir():
        return str((policy_folder / name).resolve())
    return name


def _leaves(name: str) -> bool:
    return name.split(os.sep)[0] == os.pardir


class PromptTokenizer:
    """Tokenization of prompts, truncated and padded on the right.

    Args:
        folder: with the tokenizer's files.
        max_length: longest prompt in tokens.
        padding: "longest" of the batch, or "max_length".
        prompt: text to tokenize for an instruction.

    Raises:
        ConfigError: the folder has no readable tokenizer, or one without a padding token.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_length: int,
        padding: str = "longest",
        prompt: Callable[[str], str] = with_new_line,
    ):
        from transformers import AutoTokenizer

        file = folder / TOKENIZER_FILES[0]
        if not file.is_file():
            text = f"{file} is missing; copy the tokenizer of the policy's vision-language model there"
            raise ConfigError.of(None, "missing_file", text)
        try:
            # Without `trust_remote_code=False` transformers asks on the terminal whether to run the folder's code.
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raise plain exceptions on files that are not theirs
            reason = " ".join(str(error).split())[:200]
            if "trust_remote_code" in str(error):
                reason = "it names code in auto_map, which is never run; use a tokenizer that transformers knows"
            raise ConfigError.of(None, "invalid_file", f"{folder}: no tokenizer can be read ({reason})") from None
        self.folder, self.max_length, self.padding, self._prompt = folder, max_length, padding, prompt
        self._ids: dict[str, list[int]] = {}
        self._pad = self._tokenizer.pad_token_id
        if self._pad is None:
            text = f"{folder}: the tokenizer has no padding token; set pad_token in its tokenizer_config.json"
            raise ConfigError.of(None, "invalid_file", text)

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self._tokenizer)

    def ids(self, instruction: str) -> list[int]:
        """The token ids of one instruction, without padding."""
        if instruction not in self._ids:
            if len(self._ids) >= _CACHED:
                self._ids.clear()
            encoded = self._tokenizer(self._prompt(instruction), truncation=True, max_length=self.max_length)
            self._ids[instruction] = list(encoded["input_ids"])
        return self._ids[instruction]

    def __call__(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids [B, L] int64 and their mask [B, L] bool."""
        rows = [self.ids(instruction) for instruction in instructions]
        length = self.max_length if self.padding == "max_length" else max(map(len, rows), default=0)
        tokens = torch.full((len(rows), length), self._pad, dtype=torch.int64)
        mask = torch.zeros((len(rows), length), dtype=torch.bool)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[index, : len(row)] = True
        return tokens, mask
