"""The pipelines beside a LeRobot policy (`policy_preprocessor.json`, `policy_postprocessor.json`) and their statistics.

From LeRobot 0.4 on, each is a list of steps, and a step with tensors names the file that holds them (`state_file`).
Before, statistics were tensors in model.safetensors, e.g. `normalize_inputs.buffer_observation_state.mean`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlvla.models.lerobot.features import ACTION, STATE, Features, mode_problems
from rlvla.models.lerobot.normalization import EPSILON, Normalizer, normalizer_problems
from rlvla.models.lerobot.prompts import lasting_name
from rlvla.utils.data_files import fits, inside, parse_json, read_json
from rlvla.utils.errors import ConfigError, Problem

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
NORMALIZER, UNNORMALIZER, TOKENIZER = "normalizer_processor", "unnormalizer_processor", "tokenizer_processor"
TOKENIZER_NAME = "tokenizer_name"
# Steps that leave the numbers alone.
_NEUTRAL = {"rename_observations_processor", "to_batch_processor", "device_processor"}
# Prefixes of the statistics in folders written before LeRobot 0.4.
OLD_PREFIXES = ("normalize_inputs.buffer_", "normalize_targets.buffer_", "unnormalize_outputs.buffer_")
_Statistics = dict[str, dict[str, np.ndarray]]
_without_statistics = ContextVar("without_statistics", default=False)


@contextmanager
def without_statistics() -> Iterator[None]:
    """Within the block, folders are read without what depends on their data, which is about to be replaced."""
    token = _without_statistics.set(True)
    try:
        yield
    finally:
        _without_statistics.reset(token)


def reads_statistics() -> bool:
    """Whether statistics are read, i.e. outside `without_statistics`."""
    return not _without_statistics.get()


@dataclass(frozen=True)
class Step:
    """One step of a pipeline.

    Attributes:
        name: under which LeRobot registers it.
        config: its settings.
        state_file: the file with its tensors, in the policy's folder; None: it has none.
    """

    name: str
    config: Mapping[str, Any]
    state_file: str | None = None


@dataclass(frozen=True)
class Processors:
    """What the pipelines of a folder do to states, actions and text.

    Attributes:
        state: normalizes states.
        action: its inverse turns what the network predicts into actions.
        text: settings of the tokenizer step, its tokenizer as in `lasting_name`; empty in an older folder.
        state_files: files with statistics.
        steps: settings of the steps before the network by name, in their order.
    """

    state: Normalizer
    action: Normalizer
    text: Mapping[str, Any] = field(default_factory=dict)
    state_files: tuple[str, ...] = ()
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def preprocessor(self, companions: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
        """The first pipeline of a folder with these files as a copy of the folder has it: file name -> content."""
        if PREPROCESSOR not in companions:
            return {}
        content = parse_json(companions[PREPROCESSOR], PREPROCESSOR)
        for step in content["steps"]:
            if TOKENIZER_NAME in self.text and step.get("registry_name", step.get("class")) == TOKENIZER:
                step["config"][TOKENIZER_NAME] = self.text[TOKENIZER_NAME]
        return {PREPROCESSOR: content}


def read_processors(
    folder: Path, features: Features, modes: Mapping[str, str], *, text_steps: set[str]
) -> tuple[Processors, list[Problem]]:
    """Read and check both pipelines of a folder, or the statistics of an older one.

    Args:
        folder: of the policy.
        features: its features.
        modes: kind of feature -> normalization mode, from config.json; the steps of a pipeline override it.
        text_steps: names of steps that prepare the prompt, which the family implements.

    Returns:
        The processors, which are of use only if there are no problems, and the problems.
    """
    problems: list[Problem] = []
    pipelines: list[list[Step]] = []
    for name, known in ((PREPROCESSOR, {NORMALIZER, TOKENIZER, *text_steps}), (POSTPROCESSOR, {UNNORMALIZER})):
        try:
            pipelines.append(_read_steps(folder / name, known | _NEUTRAL) if (folder / name).exists() else [])
        except ConfigError as error:
            problems += error.problems
            pipelines.append([])
    missing = [name for name in (PREPROCESSOR, POSTPROCESSOR) if not (folder / name).exists()]
    older = len(missing) == 2
    if len(missing) == 1:
        remedy = "copy the whole folder as LeRobot saved it"
        problems.append(Problem(None, "missing_file", f"{folder / missing[0]} is missing; {remedy}"))
    try:
        wanted = older and reads_statistics()
        stored = old_statistics(folder / "model.safetensors", features) if wanted else {}
    except ConfigError as error:
        return Processors(_identity(), _identity()), [*problems, *error.problems]
    if problems:
        return Processors(_identity(), _identity()), problems
    sides = []
    for steps, step_name, key, size in (
        (pipelines[0], NORMALIZER, STATE, features.state_dim),
        (pipelines[1], UNNORMALIZER, ACTION, features.action_dim),
    ):
        normalizer, wrong = _normalizer(folder, steps, step_name, key, size, features, modes, stored if older else None)
        sides.append(normalizer)
        problems += wrong
    before = {step.name: step.config for step in pipelines[0]}
    text = dict(before.get(TOKENIZER, {}))
    if isinstance(text.get(TOKENIZER_NAME), str):
        text[TOKENIZER_NAME] = lasting_name(text[TOKENIZER_NAME], folder)
    files = dict.fromkeys(step.state_file for steps in pipelines for step in steps if step.state_file)
    return Processors(sides[0], sides[1], text, tuple(files), before), problems


def _identity() -> Normalizer:
    return Normalizer("IDENTITY", {})


def _read_steps(path: Path, known: set[str]) -> list[Step]:
    raw = read_json(path).get("steps")
    if not isinstance(raw, list):
        raise ConfigError.of(None, "invalid_file", f"{path} has no list of steps; use a copy as LeRobot wrote it")
    steps, problems = [], []
    for number, entry in enumerate(raw):
        where = f"{path}: step {number}"
        parts = dict(entry) if isinstance(entry, Mapping) else {}
        name = parts.get("registry_name", parts.get("class"))
        config, state_file = parts.get("config", {}), parts.get("state_file")
        if not isinstance(name, str) or not isinstance(config, Mapping):
            problems.append(Problem(None, "invalid_file", f"{where} has no name or no settings"))
        elif name not in known:
            text = f"{where} is {name}, which is not supported here; known are {', '.join(sorted(known))}"
            problems.append(Problem(None, "mismatch", text))
        else:
            try:
                if state_file is not None:
                    inside(path.parent, state_file)
            except ValueError as error:
                problems.append(Problem(None, "invalid_file", f"{where}: state_file: {error}"))
            steps.append(Step(name, config, state_file))
    if problems:
        raise ConfigError(problems)
    return steps


def _normalizer(
    folder: Path,
    steps: list[Step],
    name: str,
    key: str,
    size: int,
    features: Features,
    modes: Mapping[str, str],
    stored: _Statistics | None,
) -> tuple[Normalizer, list[Problem]]:
    """The normalizer of one feature; `stored` are the statistics of an older folder."""
    step = next((step for step in steps if step.name == name), None)
    if step is None and stored is None:
        return _identity(), []  # as in LeRobot: what no step normalizes stays as it is
    config = step.config if step else {}
    modes = config.get("norm_map", modes)
    eps = config.get("eps", EPSILON)
    kind = features.kinds()[key]
    where = f"{folder / (PREPROCESSOR if name == NORMALIZER else POSTPROCESSOR)} ({name})"
    wrong = mode_problems(modes, "norm_map") if isinstance(modes, Mapping) else ["norm_map is not a JSON object"]
    wrong += [] if fits(eps, float) and eps > 0 else [f"eps is {eps!r}, not a positive number"]
    listed = [config[name] for name in ("features", "normalize_observation_keys") if config.get(name) is not None]
    wrong += [] if all(isinstance(names, Mapping | list) for names in listed) else ["its features are no list of names"]
    if wrong:
        return _identity(), [Problem(None, "invalid_file", f"{where}: {text}") for text in wrong]
    mode = modes.get(kind, "IDENTITY")
    # LeRobot leaves observations alone that a step does not list; actions are not looked up.
    if mode == "IDENTITY" or (key != ACTION and any(key not in names for names in listed)):
        return _identity(), []
    if not reads_statistics():
        return _identity(), []
    source = f"{folder / 'model.safetensors'}"
    if step is not None:
        source = f"{folder / step.state_file}" if step.state_file else where
        try:
            stored = read_statistics(folder / step.state_file) if step.state_file else {}
        except ConfigError as error:
            return _identity(), error.problems
    statistics = (stored or {}).get(key)
    wrong = normalizer_problems(mode, statistics, size)
    remedy = "save the policy with the statistics of its data set"
    problems = [Problem(None, "invalid_file", f"{source}: {key}: {text}; {remedy}") for text in wrong]
    return Normalizer(mode, statistics or {}, float(eps)) if not problems else _identity(), problems


def read_statistics(path: Path) -> _Statistics:
    """The statistics in a state file: feature -> name -> float32 vector.

    Raises:
        ConfigError: the file is missing or unreadable.
    """
    if not path.is_file():
        text = f"{path} is missing, which the folder's pipeline names as its statistics; copy the folder again"
        raise ConfigError.of(None, "missing_file", text)
    try:
        tensors = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ConfigError.of(None, "invalid_file", f"{path}: {error}; use another copy") from None
    statistics: _Statistics = {}
    for name, tensor in tensors.items():
        key, _, statistic = name.rpartition(".")
        statistics.setdefault(key, {})[statistic] = _vector(tensor)
    return statistics


def old_statistics(path: Path, features: Features) -> _Statistics:
    """The statistics among the weights of a folder written before LeRobot 0.4; empty if there are none."""
    from safetensors import safe_open

    statistics: _Statistics = {}
    if not path.is_file():
        return statistics
    flat = {key.replace(".", "_"): key for key in features.kinds()}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, not a dict
                prefix = next((prefix for prefix in OLD_PREFIXES if name.startswith(prefix)), None)
                if prefix is not None:
                    feature, _, statistic = name.removeprefix(prefix).rpartition(".")
                    vector = _vector(file.get_tensor(name))
                    statistics.setdefault(flat.get(feature, feature), {})[statistic] = vector
    except (SafetensorError, OSError) as error:
        raise ConfigError.of(None, "invalid_file", f"{path}: {error}; use another copy") from None
    return statistics


def _vector(tensor: Tensor) -> np.ndarray:
    values: np.ndarray = tensor.to(torch.float32).numpy()
    return values


def tokenizer_settings(name: str, max_length: int, padding: str) -> dict[str, Any]:
    """Settings of the tokenizer step of a new folder; see `PromptTokenizer`."""
    text = {"max_length": max_length, "task_key": "task", "padding_side": "right", "padding": padding}
    return {**text, "truncation": True, TOKENIZER_NAME: name}


def pipelines(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    modes: Mapping[str, str],
    *,
    tokenizer: Mapping[str, Any],
    text_step: str,
    state_files: tuple[str, str],
    device: str = "cpu",
    normalize_first: bool = False,
) -> dict[str, dict[str, Any]]:
    """The two JSON files of a new folder, as LeRobot 0.4 writes them: file name -> content.

    Args:
        kinds: feature -> kind and shape, inputs first.
        modes: kind -> normalization mode.
        tokenizer: settings of the tokenizer step.
        text_step: the step before it.
        state_files: names of the files with the statistics of the two pipelines.
        device: where LeRobot puts the tensors.
        normalize_first: before the prompt is made, as pi0.5 needs it.
    """

    def features(names: list[str]) -> dict[str, Any]:
        return {name: {"type": kinds[name][0], "shape": list(kinds[name][1])} for name in names}

    norm = {"eps": EPSILON, "norm_map": dict(modes)}
    normalizer = {"registry_name": NORMALIZER, "config": {**norm, "features": features(list(kinds))}}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": text_step, "config": {}},
        {"registry_name": TOKENIZER, "config": dict(tokenizer)},
        {"registry_name": "device_processor", "config": {"device": device, "float_dtype": None}},
    ]
    before.insert(2 if normalize_first else len(before), normalizer)
    after = [
        {"registry_name": UNNORMALIZER, "config": {**norm, "features": features([ACTION])}},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    normalizer["state_file"], after[0]["state_file"] = state_files
    return {
        PREPROCESSOR: {"name": "policy_preprocessor", "steps": before},
        POSTPROCESSOR: {"name": "policy_postprocessor", "steps": after},
    }
