"""Upload of a policy folder to the Hugging Face Hub: policy files and model card, nothing of the run or the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlvla.checkpoints.policy_folder import ENVIRONMENT_FILE
from rlvla.evaluation.model_card import model_card, read_card_record
from rlvla.evaluation.redact import redact_json, redact_paths
from rlvla.models.dataset_statistics import STATISTICS_FILE
from rlvla.models.families import ADAPTER_CONFIG_FILE, CONFIG_FILE, family_of
from rlvla.models.vla.checkpoint_files import ADAPTER_FOLDER, EVALUATION_FILE
from rlvla.utils.data_files import admit, read_json
from rlvla.utils.errors import ConfigError, Problem, RunEnded
from rlvla.utils.files import json_text
from rlvla.utils.terminal import count
from rlvla.version import __version__

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
_MODELS = {"vlm_model_name", "tokenizer_name", "base_model_name_or_path"}  # settings that name other models
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
        sizes = [(f"{u.size} B" if u.size < 1000 else f"{count(u.size)}B") for u in self.uploads]
        lines = [f"{u.name}  {size}{u.note and f'  ({u.note})'}" for u, size in zip(self.uploads, sizes)]
        return "\n".join([*lines, *(f"not uploaded: {name}  ({reason})" for name, reason in self.left)])


def select(folder: Path, card: str) -> Selection:
    """The files to upload: weights, configuration, tokenizer, statistics, record and evaluation, and the card.

    Absolute paths in JSON files are replaced by their last component, addresses by a word.

    Raises:
        ConfigError: a JSON file is damaged, the policy needs files outside of its folder, or a link leaves it.
    """
    config = folder / CONFIG_FILE
    base = read_json(config, allow_nan=True).get("base") if config.is_file() else None
    if base:
        text = f"{folder} acts with a policy in another folder ({' or '.join(map(str, base))}); upload that one"
        raise ConfigError.of("folder", "needs_others", text)
    uploads, left = [Upload(CARD_FILE, card.encode(), "the model card")], []
    for path in admit(folder):
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
        return "training state"
    if _EARLIER.fullmatch(last):
        return "an earlier evaluation"
    of_policy = last in _TEXTS or last.endswith((*WEIGHTS, _PROCESSOR)) or _PARTS.fullmatch(last)
    return None if of_policy and name != CARD_FILE else "not a policy file"


def _upload(name: str, path: Path) -> Upload:
    if path.suffix != ".json" or path.name in _VOCABULARIES or path.name.endswith(WEIGHTS):
        return Upload(name, path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}); use another copy") from error
    if outside := sorted(set(_models_outside(content))):
        text = f"{path} names {', '.join(outside)}, which is not uploaded; name a model on the hub or in the folder"
        raise ConfigError.of("folder", "needs_others", text)
    changed = redact_json(content)
    if changed == content:
        return Upload(name, path)
    return Upload(name, json_text(changed).encode(), "paths and addresses shortened")


def _models_outside(content: Any) -> Iterator[str]:
    """The models that a JSON value names by a path outside of its folder."""
    if isinstance(content, list):
        for value in content:
            yield from _models_outside(value)
    elif isinstance(content, dict):
        for name, value in content.items():
            if name in _MODELS and isinstance(value, str) and (Path(value).is_absolute() or ".." in Path(value).parts):
                yield value
            yield from _models_outside(value)


def push_problems(repo_id: str | None, *, uploads: bool) -> list[Problem]:
    """Problems of the name of the repository; `uploads`: a token is needed, too."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo_id is None:
        return [Problem("repo_id", "needs_flag", "name the repository with --repo_id OWNER/NAME")]
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        return [Problem("repo_id", "malformed", f"--repo_id {repo_id}: give OWNER/NAME ({error})")]
    if repo_id.count("/") != 1:
        return [Problem("repo_id", "malformed", f"--repo_id {repo_id}: give OWNER/NAME (the owner is missing)")]
    if uploads and get_token() is None:
        text = "there is no token for the Hugging Face Hub; make one that may write and give it to `hf auth login`"
        return [Problem("repo_id", "no_token", f"{text} or HF_TOKEN")]
    return []


def read_card(path: str) -> str:
    """A model card by the user.

    Raises:
        ConfigError: it cannot be read, or names a place on this machine.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("card", "missing_file", f"--card {path} cannot be read ({error})") from error
    for number, line in enumerate(text.splitlines(), 1):
        if redact_paths(line) != line:
            text = f"--card {path}, line {number} names a place on this machine; shorten it: {line.strip()}"
            raise ConfigError.of("card", "names_places", text)
    return text


def prepare(folder: Path, repo_id: str, license: str | None, card: str | None) -> Selection:
    """Choose the files, and write the card unless the user brings one; raises ConfigError."""
    family_of(folder)  # ConfigError for a type that is not known
    try:
        record = read_card_record(folder)
        text = read_card(card) if card is not None else model_card(record, repo_id, license)
    except (TypeError, ValueError, LookupError, AttributeError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = f"{type(error).__name__}: {error}"
        text = f"{folder}: the records of its training or evaluation hold values of other types ({reason}); remove them"
        raise ConfigError.of("folder", "invalid_file", text) from error
    return select(folder, text)


def push(repo_id: str, uploads: Sequence[Upload], *, public: bool) -> str:
    """Create the repository if needed and upload the files in one commit; returns its address.

    Weights of an earlier policy that would be loaded together with these are removed, after a line about each: those in
    the folders of these files (see `replaced_folders`).

    Args:
        repo_id: owner and name.
        uploads: the files.
        public: whether the repository may be one that everybody can read.

    Raises:
        ConfigError: the repository is public, and `public` is not given.
        RunEnded: the server refuses, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(library_name="rlvla", library_version=__version__)
    with _server_errors():
        url = api.create_repo(repo_id, private=not public, exist_ok=True)
        existing = api.model_info(repo_id)
        if not public and not existing.private:
            text = f"{repo_id} exists and everybody can read it; give --public if that is meant, or another --repo_id"
            raise ConfigError.of("public", "repo_is_public", text)
        old = _replaced([file.rfilename for file in existing.siblings or ()], uploads)
        for name in old:
            print(f"removing from {repo_id}: {name}  (weights of an earlier upload)", flush=True)
        operations = [CommitOperationAdd(upload.name, upload.content) for upload in uploads]
        removals = [CommitOperationDelete(name) for name in old]
        api.create_commit(repo_id, [*operations, *removals], commit_message=f"Policy, by rlvla {__version__}")
    return str(url)


def replaced_folders(uploads: Sequence[Upload]) -> list[str]:
    """The folders of a repository whose other weights are loaded together with these files; "." is the top."""
    folders = {PurePosixPath(upload.name).parent for upload in uploads if upload.name.endswith(WEIGHTS)}
    return sorted(map(str, folders | {folder / ADAPTER_FOLDER for folder in folders if folder.name != ADAPTER_FOLDER}))


def _replaced(existing: Sequence[str], uploads: Sequence[Upload]) -> list[str]:
    """The weights among the files of a repository that these files replace."""
    names, folders = {upload.name for upload in uploads}, replaced_folders(uploads)
    weights = [name for name in existing if name.endswith(WEIGHTS) and name not in names]
    return [name for name in weights if str(PurePosixPath(name).parent) in folders]


@contextmanager
def _server_errors() -> Iterator[None]:
    """Raise errors of the server or the network as `RunEnded`."""
    from huggingface_hub.errors import HfHubHTTPError

    http_error: Any = HfHubHTTPError.__mro__[1]  # of the HTTP library in use, which differs between versions
    try:
        yield
    except (http_error, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise RunEnded(f"the Hub cannot be written to: {' '.join(lines)}") from error
