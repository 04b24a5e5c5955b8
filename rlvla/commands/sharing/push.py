"""Uploading a policy folder to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from rlvla.commands.sharing.files import WEIGHTS, Selection, Upload, select
from rlvla.evaluation.model_card import model_card, read_card_record
from rlvla.evaluation.redact import redact_paths
from rlvla.models.vla.checkpoint_files import ADAPTER_FOLDER
from rlvla.utils.errors import ConfigError, Problem, RunEnded
from rlvla.version import __version__


def push_problems(repo_id: str | None, *, uploads: bool) -> list[Problem]:
    """What is wrong with the name of the repository; `uploads`: a token is needed, too."""
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
    return (
        [
            Problem(
                "repo_id",
                "no_token",
                "there is no token for the Hugging Face Hub; make one that may write and give it to `hf auth "
                "login` or HF_TOKEN",
            )
        ]
        if uploads and get_token() is None
        else []
    )


def read_card(path: str) -> str:
    """A card of the user's own.

    Raises:
        ConfigError: it cannot be read, or names a place on this machine.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem("card", "missing_file", f"--card {path} cannot be read ({error})")) from error
    for number, line in enumerate(text.splitlines(), 1):
        if redact_paths(line) != line:
            text = f"--card {path}, line {number} names a place on this machine; shorten it: {line.strip()}"
            raise ConfigError(Problem("card", "names_places", text))
    return text


def prepare(folder: Path, repo_id: str, license: str | None, card: str | None) -> Selection:
    """Choose the files, and write the card unless the user brings one; raises ConfigError."""
    record = read_card_record(folder)
    text = read_card(card) if card is not None else model_card(record, repo_id, license)
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
        there = api.model_info(repo_id)
        if not public and not there.private:
            text = (
                f"{repo_id} is there already and everybody can read it; give --public if that is meant, or "
                "another --repo_id"
            )
            raise ConfigError(Problem("public", "repo_is_public", text))
        old = _replaced([file.rfilename for file in there.siblings or ()], uploads)
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


def _replaced(there: Sequence[str], uploads: Sequence[Upload]) -> list[str]:
    """The weights among the files of a repository that these files replace."""
    names, folders = {upload.name for upload in uploads}, replaced_folders(uploads)
    weights = [name for name in there if name.endswith(WEIGHTS) and name not in names]
    return [name for name in weights if str(PurePosixPath(name).parent) in folders]


@contextmanager
def _server_errors() -> Iterator[None]:
    """Within the block, what the server or the network says is raised as `RunEnded`."""
    from huggingface_hub.errors import HfHubHTTPError

    http_error: Any = HfHubHTTPError.__mro__[1]  # of the HTTP library in use, which differs between versions
    try:
        yield
    except (http_error, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise RunEnded(f"the Hub cannot be written to: {' '.join(lines)}") from error
