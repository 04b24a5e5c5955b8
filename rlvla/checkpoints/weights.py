"""The weights of a model in a training checkpoint, read without the engine and the ranks that wrote it."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from torch import Tensor

from rlvla.checkpoints.training import candidates, list_checkpoints
from rlvla.utils.deepspeed.engine import classes_of_deepspeed
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import MANIFEST, damage
from rlvla.utils.terminal import log
from rlvla.utils.torch_files import read_torch_file, refusal, restricted_loading


def chosen_checkpoint(folder: Path, name: str | None = None, *, since: float = 0.0) -> Path | None:
    """The checkpoint `name` of a folder, or the newest intact one; None if there is none. Nothing is changed.

    Args:
        folder: the folder with the checkpoints of a run.
        name: the one to choose.
        since: time of modification that the newest one must exceed; others are not examined.

    Raises:
        ConfigError: there is no checkpoint of this name, or it is damaged.
    """
    if name is not None:
        known = [path.name for path in list_checkpoints(folder)]
        if name not in known:
            text = f"--load_checkpoint {name}: {folder} holds {', '.join(known) or 'no checkpoint'}"
            raise ConfigError.of("load_checkpoint", "unknown_name", text)
        problem = damage(folder / name)
        if problem is not None:
            raise ConfigError.of("load_checkpoint", "invalid_file", f"--load_checkpoint {name} is damaged: {problem}")
        return folder / name
    for path in reversed(candidates(folder)):
        manifest = path / MANIFEST
        if since and (not manifest.is_file() or manifest.stat().st_mtime <= since):
            continue
        problem = damage(path)
        if problem is None:
            return path
        log.warning(f"checkpoint {path.name} is skipped: {problem}")
    return None


def whole_weights(checkpoint: Path, model: str = "actor") -> dict[str, Tensor]:
    """Name -> parameter or buffer of a model, on the host, from a checkpoint of any ZeRO stage and number of ranks.

    With ZeRO-3 the parameters are put together from the float32 master weights of all ranks; otherwise they are those
    of the network.

    Raises:
        ConfigError: the checkpoint holds no such model, or a file that names code; none of it is run.
    """
    files = sorted((checkpoint / model).glob("*model_states.pt"))
    if not files:
        raise ConfigError(f"{checkpoint} holds no {model}")
    sharded = [path for path in files if path.name.startswith("zero_pp_rank_")]
    if not sharded:
        content = read_torch_file(files[0], classes=classes_of_deepspeed(), mmap=True)
        return dict(content["module"])
    for path in sorted((checkpoint / model).glob("*.pt")):
        reason = refusal(path, classes_of_deepspeed())
        if reason:
            raise ConfigError.of(None, "invalid_file", reason)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), restricted_loading(classes_of_deepspeed()):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=model))
