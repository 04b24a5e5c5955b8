"""What of a policy folder is shared: the files of the policy and its model card, nothing of the run or the machine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rlvla.checkpoints.policy_folder import ENVIRONMENT_FILE
from rlvla.evaluation.redact import redact_json
from rlvla.models.dataset_statistics import STATISTICS_FILE
from rlvla.models.families import ADAPTER_CONFIG_FILE, CONFIG_FILE
from rlvla.models.vla.checkpoint_files import EVALUATION_FILE
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import json_text
from rlvla.utils.terminal import count

CARD_FILE = "README.md"
WEIGHTS = (".safetensors", ".safetensors.index.json")
# By name: whatever else lies beside a policy may be its owner's.
_TEXTS = {
    *(CONFIG_FILE, ADAPTER_CONFIG_FILE, STATISTICS_FILE, ENVIRONMENT_FILE, EVALUATION_FILE),
    *("policy_preprocessor.json", "policy_postprocessor.json", "rlvla_policy.json", "sizes.json"),
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model"),
}
_PROCESSOR = "processor_config.json"  # of images, videos or all inputs: the end of its name
# Parts of public checkpoints that are stored as torch files; no other torch file belongs to a policy.
_PARTS = re.compile(r"(action_head|noisy_action_projector|proprio_projector|vision_backbone)--\w+_checkpoint\.pt")
_STATE_OF_TRAINING = re.compile(r"optim|scheduler|rng_state|training_st|checkpoints", re.IGNORECASE)
# Earlier evaluations are kept beside the last one; its figures are those of the card.
_EARLIER = re.compile(r"eval_\d+\.json")
# Words of a tokenizer may look like paths; these files are the same wherever they come from.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class Upload:
    """A file of the repository.

    Attributes:
        name: its path there.
        content: what is uploaded: the file itself, or its changed content.
        note: what was changed.
    """

    name: str
    content: Path | bytes
    note: str = ""

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


@dataclass(frozen=True)
class Selection:
    """The model card, the files that are uploaded, and (name, reason) of those that are not."""

    card: str
    uploads: tuple[Upload, ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [
            f"{upload.name}  {_size(upload.size)}{upload.note and f'  ({upload.note})'}" for upload in self.uploads
        ]
        return "\n".join([*lines, *(f"not uploaded: {name}  ({reason})" for name, reason in self.left)])


def _size(number: int) -> str:
    return f"{count(number)}B" if number >= 1000 else f"{number} B"


def select(folder: Path, card: str) -> Selection:
    """The files to upload: weights, configuration, tokenizer, statistics, record and evaluation, and the card.

    Absolute paths in JSON files are replaced by their last component, addresses by a word.

    Raises:
        ConfigError: a JSON file is damaged, or the policy needs files outside of its folder.
    """
    config = folder / CONFIG_FILE
    base = read_json(config, allow_nan=True).get("base") if config.is_file() else None
    if base:
        text = (
            f"{folder} acts with a policy in another folder ({' or '.join(map(str, base))}), which would "
            "be missing; upload that one"
        )
        raise ConfigError(Problem("folder", "needs_others", text))
    uploads, left = [Upload(CARD_FILE, card.encode(), "the model card")], []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        reason = _reason_to_leave(name)
        if reason is None:
            uploads.append(_upload(name, path))
        elif name != CARD_FILE:
            left.append((name, reason))
    return Selection(card, tuple(uploads), tuple(left))


def _reason_to_leave(name: str) -> str | None:
    """Why a file does not belong to the policy, or None."""
    last = name.rpartition("/")[2]
    if any(part.startswith(".") for part in name.split("/")):
        return "hidden"
    if _STATE_OF_TRAINING.search(name):
        return "a state of training"
    if _EARLIER.fullmatch(last):
        return "an earlier evaluation"
    if name == CARD_FILE or not _is_of_policy(last):
        return "no file of a policy"
    return None


def _is_of_policy(name: str) -> bool:
    """By the name without folders."""
    return name in _TEXTS or name.endswith((*WEIGHTS, _PROCESSOR)) or _PARTS.fullmatch(name) is not None


def _upload(name: str, path: Path) -> Upload:
    if path.suffix != ".json" or path.name in _VOCABULARIES or path.name.endswith(WEIGHTS):
        return Upload(name, path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}); use another copy") from error
    changed = redact_json(content)
    if changed == content:
        return Upload(name, path)
    return Upload(name, json_text(changed).encode(), "paths and addresses shortened")
