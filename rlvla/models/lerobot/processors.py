"""The pipelines beside a LeRobot policy (`policy_preprocessor.json`, `policy_postprocessor.json`) and their statistics.

From LeRobot 0.4 on, each is a list of steps, and a step with tensors names the file that holds them (`state_file`).
Before, statistics were tensors in model.safetensors, e.g. `normalize_inputs.buffer_observation_state.mean`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlvla.models.codec import varying
from rlvla.models.lerobot.config import (
    ACTION,
    STATE,
    STATISTICS,
    Features,
    LeRobotConfig,
    features_json,
    mode_problems,
)
from rlvla.models.lerobot.prompts import lasting_name
from rlvla.utils.data_files import fits, inside, parse_json, read_json
from rlvla.utils.errors import ConfigError, Problem, collected

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
NORMALIZER, UNNORMALIZER, TOKENIZER = "normalizer_processor", "unnormalizer_processor", "tokenizer_processor"
TOKENIZER_NAME = "tokenizer_name"
_MOST_STEPS = 64  # of a pipeline
# Steps that leave the numbers alone.
_NEUTRAL = {"rename_observations_processor", "to_batch_processor", "device_processor"}
# Actions relative to the state (LeRobot >= 0.5.1), supported only with `enabled: false`.
RELATIVE, ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
# Prefixes of the statistics in folders written before LeRobot 0.4.
OLD_PREFIXES = ("normalize_inputs.buffer_", "normalize_targets.buffer_", "unnormalize_outputs.buffer_")
_Statistics = dict[str, dict[str, np.ndarray]]
_without_statistics = ContextVar("without_statistics", default=False)
EPSILON = 1e-8


@contextmanager
def without_statistics() -> Iterator[None]:
    """Within the block, folders are read without their statistics, which are about to be replaced."""
    token = _without_statistics.set(True)
    try:
        yield
    finally:
        _without_statistics.reset(token)


def reads_statistics() -> bool:
    """False inside `without_statistics`."""
    return not _without_statistics.get()


@dataclass(frozen=True)
class Normalizer:
    """Normalization of the vectors of one feature.

    MEAN_STD gives (x - mean) / (std + eps); MIN_MAX, QUANTILES and QUANTILE10 map the range between two statistics to
    [-1, 1], with a range of zero replaced by eps; IDENTITY changes nothing.

    Attributes:
        mode: a key of `STATISTICS`.
        statistics: the float32 vectors that the mode needs, by name.
        eps: guards against division by zero.
    """

    mode: str
    statistics: Mapping[str, np.ndarray]
    eps: float = EPSILON

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """[..., n] in units of the environment -> [..., n] float32 in units of the network."""
        values = np.asarray(values, np.float32)
        if self.mode == "IDENTITY":
            return values
        first, second = self._pair()
        if self.mode == "MEAN_STD":
            return (values - first) / (second + np.float32(self.eps))
        return 2 * (values - first) / self._range(first, second) - 1

    def unnormalize(self, values: np.ndarray) -> np.ndarray:
        """The inverse of `normalize`; as in LeRobot, MEAN_STD multiplies by std without eps."""
        values = np.asarray(values, np.float32)
        if self.mode == "IDENTITY":
            return values
        first, second = self._pair()
        if self.mode == "MEAN_STD":
            return values * second + first
        return (values + 1) / 2 * self._range(first, second) + first

    def _pair(self) -> tuple[np.ndarray, np.ndarray]:
        first, second = STATISTICS[self.mode]
        return self.statistics[first], self.statistics[second]

    def _range(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.where(high == low, np.float32(self.eps), high - low)


IDENTITY = Normalizer("IDENTITY", {})


def normalizer_problems(mode: str, statistics: Mapping[str, np.ndarray] | None, size: int) -> list[str]:
    """Problems of a mode with these statistics of a vector of `size` numbers."""
    needed = STATISTICS[mode]
    missing = [name for name in needed if name not in (statistics or {})]
    if missing:
        return [f"{' and '.join(missing)} missing, which {mode} needs"]
    problems = []
    for name in needed:
        values = (statistics or {})[name]
        if values.shape != (size,):
            problems.append(f"{name} has shape {list(values.shape)}, not [{size}]")
        elif not np.isfinite(values).all():
            problems.append(f"{name} has values that are not finite; the policy was saved without its statistics")
    return problems


@dataclass(frozen=True)
class Step:
    """One step of a pipeline.

    Attributes:
        name: LeRobot's registry name.
        config: its settings.
        state_file: file with its tensors, in the policy's folder, if any.
    """

    name: str
    config: Mapping[str, Any]
    state_file: str | None = None


@dataclass(frozen=True)
class Processors:
    """Preprocessing of states and text and postprocessing of actions, from the pipelines of a folder.

    Attributes:
        state: normalizes states.
        action: normalizes actions; its inverse is applied to predictions.
        text: settings of the tokenizer step, its tokenizer as in `lasting_name`; empty in an older folder.
        state_files: files with statistics.
        steps: settings of the preprocessing steps by name, in their order.
    """

    state: Normalizer
    action: Normalizer
    text: Mapping[str, Any] = field(default_factory=dict)
    state_files: tuple[str, ...] = ()
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def preprocessor(self, companions: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
        """The preprocessor for a copy of a folder with these files: file name -> content."""
        if PREPROCESSOR not in companions:
            return {}
        content = parse_json(companions[PREPROCESSOR], PREPROCESSOR)
        for step in content["steps"]:
            if TOKENIZER_NAME in self.text and step.get("registry_name", step.get("class")) == TOKENIZER:
                step["config"][TOKENIZER_NAME] = self.text[TOKENIZER_NAME]
        return {PREPROCESSOR: content}


class LeRobotCodec:
    """Normalization of states and actions by the pipelines of a folder; without padding.

    Args:
        processors: of the folder.
        chunk: (A, D), actions executed per decision, and their dimensions.
    """

    def __init__(self, processors: Processors, chunk: tuple[int, int]):
        self._processors, self._chunk = processors, chunk

    def normalize_proprio(self, proprio: Any) -> np.ndarray:
        """[..., P] of the environment -> [..., P] float32."""
        return self._processors.state.normalize(proprio)

    def normalize_actions(self, actions: np.ndarray) -> np.ndarray:
        """[..., D] of the environment -> [..., D] float32."""
        return self._processors.action.normalize(actions)

    def unnormalize_actions(self, actions: np.ndarray) -> np.ndarray:
        """The inverse of `normalize_actions`."""
        return self._processors.action.unnormalize(actions)

    @property
    def effective_numbers(self) -> Tensor:
        """[A*D] bool: numbers in a chunk that can change the action, see `StatisticsCodec`."""
        return varying(self.unnormalize_actions(np.linspace(-1.0, 1.0, 5)[:, None, None] + np.zeros(self._chunk)))

    @property
    def action_mask(self) -> list[bool]:
        """[D]: every dimension is normalized, unless none is."""
        return [self._processors.action.mode != "IDENTITY"] * self._chunk[1]

    def same_states(self, other: LeRobotCodec) -> bool:
        """Whether both normalize every state to the same result."""
        mine, theirs = self._processors.state, other._processors.state
        if (mine.mode, mine.eps) != (theirs.mode, theirs.eps) or mine.statistics.keys() != theirs.statistics.keys():
            return False
        return all(np.array_equal(mine.statistics[name], theirs.statistics[name]) for name in mine.statistics)


def read_processors(folder: Path, config: LeRobotConfig) -> tuple[Processors, list[Problem]]:
    """Read and check both pipelines of a folder, or the statistics of an older one.

    Args:
        folder: of the policy.
        config: its config.json; the normalization modes of a pipeline's steps override `normalization_mapping`.

    Returns:
        The processors, usable only without problems, and the problems.
    """
    features = config.features
    problems: list[Problem] = []
    pipelines: list[list[Step]] = []
    supported_steps = {
        PREPROCESSOR: {NORMALIZER, TOKENIZER, RELATIVE, config.text_step},
        POSTPROCESSOR: {UNNORMALIZER, ABSOLUTE},
    }
    for name, supported in supported_steps.items():
        path = folder / name
        steps = collected(problems, partial(_read_steps, path, supported | _NEUTRAL)) if path.exists() else None
        pipelines.append(steps or [])
    missing = [name for name in (PREPROCESSOR, POSTPROCESSOR) if not (folder / name).exists()]
    older = len(missing) == 2
    if len(missing) == 1:
        remedy = "copy the whole folder as LeRobot saved it"
        problems.append(Problem(None, "missing_file", f"{folder / missing[0]} is missing; {remedy}"))
    stored: _Statistics | None = {} if older else None
    if older and reads_statistics():
        stored = collected(problems, lambda: old_statistics(folder / "model.safetensors", features))
    if problems:
        return Processors(IDENTITY, IDENTITY), problems
    normalizers = []
    for steps, step_name, key in ((pipelines[0], NORMALIZER, STATE), (pipelines[1], UNNORMALIZER, ACTION)):
        step = next((step for step in steps if step.name == step_name), None)
        normalizer, wrong = _normalizer(folder, step, step_name, key, config, stored)
        normalizers.append(normalizer)
        problems += wrong
    before = {step.name: step.config for step in pipelines[0]}
    text = dict(before.get(TOKENIZER, {}))
    if isinstance(text.get(TOKENIZER_NAME), str):
        text[TOKENIZER_NAME] = lasting_name(text[TOKENIZER_NAME], folder)
    files = dict.fromkeys(step.state_file for steps in pipelines for step in steps if step.state_file)
    state, action = normalizers
    return Processors(state, action, text, tuple(files), before), problems


def _read_steps(path: Path, supported: set[str]) -> list[Step]:
    raw = read_json(path).get("steps")
    if not isinstance(raw, list):
        raise ConfigError.of(None, "invalid_file", f"{path} has no list of steps; use a copy as LeRobot wrote it")
    if len(raw) > _MOST_STEPS:
        text = f"{path} has {len(raw):,} steps; at most {_MOST_STEPS} are read"
        raise ConfigError.of(None, "invalid_file", text)
    steps, problems = [], []
    for number, entry in enumerate(raw):
        where = f"{path}: step {number}"
        entry = entry if isinstance(entry, Mapping) else {}
        name = entry.get("registry_name", entry.get("class"))
        config, state_file = entry.get("config", {}), entry.get("state_file")
        if not isinstance(name, str) or not isinstance(config, Mapping):
            problems.append(Problem(None, "invalid_file", f"{where} has no name or no settings"))
        elif name not in supported:
            text = f"{where} is {name}, which is not supported; supported are {', '.join(sorted(supported))}"
            problems.append(Problem(None, "mismatch", text))
        elif name in (RELATIVE, ABSOLUTE) and config.get("enabled", False) is not False:
            text = f"{where}, {name}, is enabled: actions relative to the state are not supported"
            problems.append(Problem(None, "mismatch", f"{text}; use a policy trained on absolute actions"))
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
    folder: Path, step: Step | None, name: str, key: str, config: LeRobotConfig, stored: _Statistics | None
) -> tuple[Normalizer, list[Problem]]:
    """The normalizer of one feature.

    Args:
        folder: of the policy.
        step: of the pipeline, if it has one.
        name: of the step.
        key: of the feature.
        config: of the policy.
        stored: the statistics of an older folder; None: the folder has pipelines.
    """
    if step is None and stored is None:
        return IDENTITY, []  # as in LeRobot, which normalizes nothing without a step
    settings = step.config if step else {}
    modes = settings.get("norm_map", config.normalization_mapping)
    eps = settings.get("eps", EPSILON)
    where = f"{folder / (PREPROCESSOR if name == NORMALIZER else POSTPROCESSOR)} ({name})"
    wrong = mode_problems(modes, "norm_map") if isinstance(modes, Mapping) else ["norm_map is not a JSON object"]
    wrong += [] if fits(eps, float) and eps > 0 else [f"eps is {eps!r}, not a positive number"]
    listed = [settings[name] for name in ("features", "normalize_observation_keys") if settings.get(name) is not None]
    wrong += [] if all(isinstance(keys, Mapping | list) for keys in listed) else ["its features are not a list"]
    if wrong:
        return IDENTITY, [Problem(None, "invalid_file", f"{where}: {text}") for text in wrong]
    feature = config.features.all[key]
    mode = modes.get(feature.kind, "IDENTITY")
    # LeRobot leaves observations alone that a step does not list; actions are not looked up.
    unlisted = key != ACTION and any(key not in keys for keys in listed)
    if mode == "IDENTITY" or unlisted or not reads_statistics():
        return IDENTITY, []
    source = f"{folder / 'model.safetensors'}"
    if step is not None:
        source = f"{folder / step.state_file}" if step.state_file else where
        try:
            stored = read_statistics(folder / step.state_file) if step.state_file else {}
        except ConfigError as error:
            return IDENTITY, error.problems
    statistics = (stored or {}).get(key)
    remedy = "save the policy with the statistics of its data set"
    problems = [
        Problem(None, "invalid_file", f"{source}: {key}: {text}; {remedy}")
        for text in normalizer_problems(mode, statistics, feature.shape[0])
    ]
    return Normalizer(mode, statistics or {}, float(eps)) if not problems else IDENTITY, problems


def read_statistics(path: Path) -> _Statistics:
    """The statistics in a state file: feature -> name -> float32 vector.

    Raises:
        ConfigError: the file is missing or unreadable.
    """
    if not path.is_file():
        text = f"{path} is missing, the statistics of the folder's pipeline; copy the folder again"
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
    flat = {key.replace(".", "_"): key for key in features.all}
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


def statistics_tensors(statistics: Mapping[str, Mapping[str, Sequence[float]]], mode: str) -> dict[str, Tensor]:
    """The content of a new state file.

    Raises:
        ConfigError: statistics that the normalization mode needs are missing.
    """
    missing = [
        f"{key}.{name}" for key in (STATE, ACTION) for name in STATISTICS[mode] if name not in statistics.get(key, {})
    ]
    if missing:
        raise ConfigError(f"the statistics lack {', '.join(missing)}, which {mode} needs")
    read = {name for names in STATISTICS.values() for name in names}
    return {
        f"{key}.{name}": torch.from_numpy(np.asarray(values, np.float32))
        for key, entries in statistics.items()
        for name, values in entries.items()
        if name in read
    }


def tokenizer_settings(name: str, max_length: int, padding: str) -> dict[str, Any]:
    """Settings of the tokenizer step of a new folder; see `PromptTokenizer`."""
    text = {"max_length": max_length, "task_key": "task", "padding_side": "right", "padding": padding}
    return {**text, "truncation": True, TOKENIZER_NAME: name}


def new_pipelines(
    config: LeRobotConfig, tokenizer: Mapping[str, Any], *, relative: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Both pipelines of a new folder, in LeRobot's order.

    Args:
        config: of the policy.
        tokenizer: settings of the tokenizer step.
        relative: settings of the disabled step `RELATIVE`; None: without the steps of LeRobot 0.5.1.

    Returns:
        File name -> content.
    """
    features = config.features
    norm = {"eps": EPSILON, "norm_map": dict(config.normalization_mapping)}
    normalizer: dict[str, Any] = {
        "registry_name": NORMALIZER,
        "config": {**norm, "features": features_json(features.all)},
    }
    unnormalizer: dict[str, Any] = {
        "registry_name": UNNORMALIZER,
        "config": {**norm, "features": features_json(features.outputs)},
    }
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": config.text_step, "config": {}},
        {"registry_name": TOKENIZER, "config": dict(tokenizer)},
        device,
    ]
    after = [unnormalizer, device]
    place = 2 if config.state_in_prompt else len(before)
    before.insert(place, normalizer)
    if relative is not None:
        before.insert(place, {"registry_name": RELATIVE, "config": dict(relative)})
        after.insert(1, {"registry_name": ABSOLUTE, "config": {"enabled": False}})
    for name, step, steps in (("preprocessor", normalizer, before), ("postprocessor", unnormalizer, after)):
        number = steps.index(step)
        step["state_file"] = f"policy_{name}_step_{number}_{step['registry_name']}.safetensors"
    return {
        PREPROCESSOR: {"name": "policy_preprocessor", "steps": before},
        POSTPROCESSOR: {"name": "policy_postprocessor", "steps": after},
    }


def state_files(pipelines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """State files that the steps of both pipelines name."""
    return [step["state_file"] for pipeline in pipelines.values() for step in pipeline["steps"] if "state_file" in step]
