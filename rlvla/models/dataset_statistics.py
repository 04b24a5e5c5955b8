"""The file `dataset_statistics.json`: dataset -> "action" and "proprio" -> mean, std, min, max, q01, q99, mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlvla.utils.errors import ConfigError

STATISTICS_FILE = "dataset_statistics.json"
RANGES = (("q01", "q99"), ("min", "max"))
_NARROW = 1e-4  # of the range between minimum and maximum
_NUMBERS = ("mean", "std", "min", "max", "q01", "q99")


def resolve_statistics_key(statistics: dict[str, Any], suite: str | None) -> str:
    """Key of the statistics: the suite's name, else `{suite}_no_noops`; with None the only key.

    Raises:
        ConfigError: the key is missing or ambiguous; the message lists the keys.
    """
    if not statistics:
        raise ConfigError(f"the checkpoint has no action statistics; copy its {STATISTICS_FILE}")
    if suite is None:
        if len(statistics) == 1:
            return next(iter(statistics))
        raise ConfigError(f"the checkpoint has statistics for {sorted(statistics)}; say which one to use")
    for key in (suite, f"{suite}_no_noops"):
        if key in statistics:
            return key
    raise ConfigError(
        f"the checkpoint has no action statistics for {suite!r} (nor {suite + '_no_noops'!r}); "
        f"it has {sorted(statistics)}"
    )


def narrow_dimensions(entry: Mapping[str, Any]) -> dict[str, list[int]]:
    """Part -> dimensions whose quantiles nearly coincide although their values differ.

    At least 98 % of the steps have the same value: normalized by quantiles, the others would be huge or be lost.
    """
    narrow: dict[str, list[int]] = {}
    for part in ("action", "proprio"):
        stats = entry.get(part)
        if not stats or any(name not in stats for pair in RANGES for name in pair):
            continue
        columns = zip(stats["q01"], stats["q99"], stats["min"], stats["max"])
        dims = [d for d, (q01, q99, low, high) in enumerate(columns) if q99 - q01 < _NARROW * (high - low)]
        narrow |= {part: dims} if dims else {}
    return narrow


def with_full_ranges(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with minimum and maximum as the quantiles of its `narrow_dimensions`."""
    widened = dict(entry)
    for part, dims in narrow_dimensions(entry).items():
        widened[part] = dict(entry[part])
        for quantile, bound in (("q01", "min"), ("q99", "max")):
            pairs = enumerate(zip(entry[part][quantile], entry[part][bound]))
            widened[part][quantile] = [full if d in dims else value for d, (value, full) in pairs]
    return widened


def statistics_problems(statistics: Any, dims: Mapping[str, int]) -> list[str]:
    """Problems of the whole file; `dims` as in `entry_problems`, for all datasets."""
    if not isinstance(statistics, dict) or not statistics:
        return ["has no statistics; a JSON object with an entry for each dataset is needed"]
    problems = []
    for key, entry in statistics.items():
        texts = entry_problems(entry, dims)
        for part in dims if not texts else ():
            if not any(low in entry[part] and high in entry[part] for low, high in RANGES):
                texts.append(f"{part} has no range; it needs q01 and q99, or min and max")
        problems += [f"{key!r}: {text}" for text in texts]
    return problems


def value_problems(statistics: Mapping[str, Any]) -> list[str]:
    """Invalid values of all datasets in the file, for any number of dimensions."""
    problems = []
    for key, entry in statistics.items():
        for part in ("action", "proprio"):
            values = entry.get(part) if isinstance(entry, dict) else None
            lists = values.values() if isinstance(values, dict) else ()
            lengths = [len(numbers) for numbers in lists if isinstance(numbers, list)]
            if lengths:
                problems += [f"{key!r}: {text}" for text in entry_problems(entry, {part: lengths[0]})]
    return problems


def entry_problems(entry: Any, dims: Mapping[str, int]) -> list[str]:
    """Problems of the statistics of one dataset, with key and value.

    Args:
        entry: the entry of the dataset.
        dims: "action" and, if it is used, "proprio" -> number of dimensions.
    """
    if not isinstance(entry, dict):
        return [f"is {_shown(entry)}; an object with the statistics of 'action' and 'proprio' is needed"]
    problems = []
    for part, size in dims.items():
        values = entry.get(part)
        if not isinstance(values, dict):
            problems.append(f"the {part} statistics are missing")
            continue
        lists = {key: values[key] for key in (*_NUMBERS, "mask") if values.get(key) is not None}
        texts = [f"{part}.{key} {text}" for key, held in lists.items() if (text := _problem(key, held, size))]
        problems += texts
        if not texts:
            problems += [
                f"{part}.{low} is larger than {part}.{high} in dimension {dim}"
                for low, high in RANGES
                if low in lists and high in lists
                for dim in range(size)
                if lists[low][dim] > lists[high][dim]
            ]
    return problems


def _problem(key: str, values: Any, size: int) -> str | None:
    types, title = ((bool, int), "true or false") if key == "mask" else ((int, float), "finite numbers")
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, types) for value in values):
        return f"is {_shown(values)}; expected {size} times {title}"
    if len(values) != size:
        return f"has {len(values)} dimensions, expected {size}"
    if key == "mask":
        return None
    bad = [dim for dim, value in enumerate(values) if isinstance(value, bool) or not _finite(value)]
    return f"is {values[bad[0]]} in dimension {bad[0]}; expected finite numbers" if bad else None


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
