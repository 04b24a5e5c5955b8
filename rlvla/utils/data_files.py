"""Reading untrusted JSON and YAML: any defect becomes a `ConfigError` that names the file."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlvla.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = TypeVar("Kind", bound="DataclassInstance")

_LONGEST_REASON = 200
_MOST_LISTED = 8
_REPOSITORIES = ("models--", "datasets--", "spaces--")  # begin folders of the Hugging Face cache
_MOST_JSON_BYTES = 2**26
# Limits of a YAML text, within which it is read in a second.
_MOST_BYTES = 2**20
_MOST_NODES = 50_000  # each counted as often as aliases repeat it
_DEEPEST = 100  # mappings and lists in each other
_MOST_SETTINGS = 1_000  # keys of a file of settings; each unknown one is compared with all flags
_YAML_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_LONGEST_NUMBER = 400  # characters; float64 has up to 309 digits before the point


def read_json(path: Path, *, allow_nan: bool = False) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file.
        allow_nan: also accept NaN and infinity, as in measurements of a run.

    Raises:
        ConfigError: the file cannot be read, is not JSON in UTF-8, holds anything but an object, names a key twice, is
            nested too deeply, or has a number that is not finite.
    """
    if path.exists() and not path.is_file():
        raise ConfigError.of(None, "invalid_file", f"{path} is not a file; JSON is read from files alone")
    return parse_json(content_of(path), path, allow_nan=allow_nan)


def parse_json(text: str | bytes, where: object, *, allow_nan: bool = False) -> dict[str, Any]:
    """The JSON object in a text; `where` names its place in messages. Errors as in `read_json`."""

    def refuse(name: str) -> float:
        if allow_nan:
            return float(name)
        raise ValueError(f"{name} is not a finite number")

    def number(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_duplicates([key for key, _ in pairs])
        return dict(pairs)

    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        content = json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=number)
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(None, "invalid_file", f"{where} is not valid JSON ({_why(error)})") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError.of(None, "invalid_file", f"{where} holds a {kind}; a JSON object is needed")
    return content


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, without tags that create objects.

    Raises:
        ConfigError: the file cannot be read, is not YAML in UTF-8, names a key twice, has a list or a mapping for a
            key, or exceeds the limits of this module on bytes, nodes (with aliases expanded), nesting and digits.
    """
    return _parse_yaml(content_of(path, _MOST_BYTES), path)[0]


def read_settings(path: Path) -> tuple[Any, dict[tuple[str, ...], int]]:
    """The content of a YAML file of settings, and the line, counted from 1, of each key of its mappings.

    Keys are named by the keys above them and themselves: `("stages", "sft", "seed")`. Errors as in `read_yaml`, and
    for more than 1,000 keys.
    """
    content, lines = _parse_yaml(content_of(path, _MOST_BYTES), path)
    if len(lines) > _MOST_SETTINGS:
        text = f"{path} has {len(lines):,} keys, more than {_MOST_SETTINGS:,}; keep those that are settings"
        raise ConfigError.of(None, "invalid_file", text)
    return content, lines


def parse_yaml(text: str, where: object) -> Any:
    """The content of a YAML text; `where` names its place in messages. Errors as in `read_yaml`."""
    return _parse_yaml(text.encode("utf-8", "replace"), where)[0]


def _parse_yaml(content: bytes, where: object) -> tuple[Any, dict[tuple[str, ...], int]]:
    import yaml  # not installed where only environments run

    lines: dict[tuple[str, ...], int] = {}

    def note_lines(node: Any, above: tuple[str, ...]) -> None:
        entries = node.value if isinstance(node, yaml.MappingNode) else []
        for key, value in sorted(entries, key=lambda entry: entry[0].value == "<<"):
            if key.value == "<<":  # the keys of other mappings, over which those beside it take precedence
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    note_lines(merged, above)
            elif isinstance(key, yaml.ScalarNode):
                lines.setdefault((*above, key.value), key.start_mark.line + 1)
                note_lines(value, (*above, key.value))

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built

    class Loader(base):  # type: ignore[misc]
        def get_single_node(self) -> Any:
            node = super().get_single_node()
            note_lines(node, ())
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
                raise ValueError("a key is a list or a mapping; keys are words or numbers")
            keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            _refuse_duplicates([str(self.construct_object(key, deep=True)) for key in keys])
            return super().construct_mapping(node, deep)

        def construct_scalar(self, node: Any) -> Any:
            value = super().construct_scalar(node)
            if node.tag in _YAML_NUMBERS and len(value) > _LONGEST_NUMBER:
                raise ValueError(f"a number has {len(value):,} digits; at most {_LONGEST_NUMBER} are read")
            return value

    try:
        text = content.decode("utf-8")
        _check_yaml_size(text, base)
        return yaml.load(text, Loader=Loader), lines  # derived from the safe one
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError.of(None, "invalid_file", f"{where} is not valid YAML ({_why(error)})") from error


def _check_yaml_size(text: str, loader: Any) -> None:
    """Count nodes and nesting from the events of a parser, which is not recursive, before any node is made."""
    import yaml

    if len(text) > _MOST_BYTES:
        raise ValueError(_too_long(len(text)))
    nodes, sizes = 0, {}  # anchor -> number of nodes
    parents: list[tuple[str | None, int]] = []  # anchor, number of nodes before it
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = parents.pop()
            sizes[anchor] = nodes - before
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in parents):
                raise ValueError(f"the alias {_shown(event.anchor)} refers to a list or mapping that holds it")
            nodes += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                parents.append((event.anchor, nodes))
            nodes += 1
            sizes[event.anchor] = 1
        if nodes > _MOST_NODES:
            raise ValueError(f"it has more than {_MOST_NODES:,} values, aliases included; shorten it")
        if len(parents) > _DEEPEST:
            raise ValueError("it is nested too deeply")


def _too_long(size: int, most: int = _MOST_BYTES) -> str:
    return f"it has {size:,} bytes, more than {most:,}; shorten it"


def content_of(path: Path, most: int = _MOST_JSON_BYTES) -> bytes:
    """The bytes of a file of at most `most` bytes; errors as in `read_json`."""
    try:
        size = path.stat().st_size
        if size > most:
            raise ConfigError.of(None, "invalid_file", f"{path} cannot be read ({_too_long(size, most)})")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError.of(None, "missing_file", f"{path} is missing") from None
    except OSError as error:
        raise ConfigError.of(None, "invalid_file", f"{path} cannot be read ({_why(error)})") from error


def _refuse_duplicates(keys: Sequence[str]) -> None:
    if len(set(keys)) < len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise ValueError(f"{twice!r} is named twice")


def _why(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__


def read_dataclass(kind: type[Kind], raw: Mapping[str, Any], where: object, *, without: Sequence[str] = ()) -> Kind:
    """A dataclass from a JSON object; lists become tuples, and unknown entries are ignored.

    Args:
        kind: the class; fields without a default must be there.
        raw: the object.
        where: named in messages.
        without: fields that are not read.

    Raises:
        ConfigError: entries are missing or have other types.
    """
    fields = [field for field in dataclasses.fields(kind) if field.name not in without]
    absent = (dataclasses.MISSING, dataclasses.MISSING)
    required = [field.name for field in fields if (field.default, field.default_factory) == absent]
    missing = [name for name in required if name not in raw]
    if missing:
        raise ConfigError.of(None, "invalid_file", f"{where}: {', '.join(missing)} missing")
    values = {field.name: raw[field.name] for field in fields if field.name in raw}
    check_types(values, field_types(kind), where)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def field_types(kind: type) -> Mapping[str, Any]:
    """Name -> type of the fields of a dataclass; cached, since annotations have to be compiled."""
    return _field_types(kind)


@functools.cache
def _field_types(kind: type) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(kind))


def check_types(content: Mapping[str, Any], hints: Mapping[str, Any], where: object) -> None:
    """Check the types of the entries of a JSON object; entries without a hint, and absent ones, are ignored.

    Args:
        content: the object.
        hints: name -> type annotation (`int`, `str | None`, `tuple[int, ...]`, `list[float]`, `dict[str, int]`).
        where: named in messages.

    Raises:
        ConfigError: with one problem for each entry of another type.
    """
    problems = [
        Problem(None, "invalid_file", f"{where}: {name} is {_shown(content[name])}, not {_type_name(hint)}")
        for name, hint in hints.items()
        if name in content and not fits(content[name], hint)
    ]
    if problems:
        raise ConfigError(problems)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON has the type of an annotation; lists pass for tuples, whole numbers for `float`."""
    if hint is Any:
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in args)
    if hint is None or hint is type(None):
        return value is None
    if origin in (list, tuple, Sequence):
        entry = args[0] if args else Any
        return isinstance(value, (list, tuple)) and all(fits(one, entry) for one in value)
    if origin in (dict, Mapping):
        entry = args[1] if args else Any
        return isinstance(value, Mapping) and all(fits(one, entry) for one in value.values())
    if hint is float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        try:
            return math.isfinite(value)
        except OverflowError:  # an integer beyond all floats
            return False
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _type_name(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint)) if typing.get_origin(hint) is None else str(hint)


def inside(folder: Path, name: object) -> Path:
    """`folder / name` for a name from a file; ValueError unless it is a relative path that stays inside the folder."""
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{_shown(name)} is not the name of a file in {folder}")
    path = folder / name
    if problem := _link_problem(path, folder, _places(folder)):
        raise ValueError(problem)
    return path


def without_local_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the entries of `auto_map` for code in its folder, which is not copied.

    Entries for code in another repository ("owner/name--module.Class") stay.
    """
    auto_map = config.get("auto_map")
    entries = auto_map if isinstance(auto_map, Mapping) else {}
    kept = {name: value for name, value in entries.items() if isinstance(value, str) and "--" in value}
    rest = {name: value for name, value in config.items() if name != "auto_map"}
    return rest | {"auto_map": kept} if kept else rest


def admit(folder: Path, *, below: bool = True) -> list[Path]:
    """The files of a folder from elsewhere, sorted; called before any of them is read, copied or uploaded.

    Links have to stay inside the folder or, in a snapshot of the Hugging Face cache, lead to the blobs of its
    repository.

    Args:
        folder: a policy, a data set or a checkpoint.
        below: also the files of its folders, at any depth.

    Raises:
        ConfigError: a link leaves the folder, or there is a pipe, socket or device in it; reports all of them.
    """
    files: list[Path] = []
    problems: list[str] = []
    places, open_folders = _places(folder), [folder]
    while open_folders:
        try:
            entries = sorted(os.scandir(open_folders.pop()), key=lambda entry: entry.name)
        except OSError as error:
            raise ConfigError.of(None, "invalid_file", f"{folder} cannot be listed ({error.strerror})") from error
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                open_folders += [path] if below else []
            elif entry.is_file(follow_symlinks=False):
                files.append(path)
            elif problem := _link_problem(path, folder, places):
                problems.append(problem)
            elif path.is_file():
                files.append(path)
    if problems:
        listed = [*problems[:_MOST_LISTED], *([f"{folder}: and more"] if len(problems) > _MOST_LISTED else [])]
        raise ConfigError(Problem(None, "leaves_folder", problem) for problem in listed)
    return sorted(files)


def _places(folder: Path) -> list[Path]:
    """Where the files of a folder may lie: inside it, or in the blobs of its repository in the Hugging Face cache."""
    real = folder.resolve()
    snapshots = next((place for place in (real, *real.parents) if place.parent.name == "snapshots"), None)
    cached = snapshots is not None and snapshots.parents[1].name.startswith(_REPOSITORIES)
    return [real, snapshots.parents[1] / "blobs"] if snapshots is not None and cached else [real]


def _link_problem(path: Path, folder: Path, places: Sequence[Path]) -> str | None:
    """Why `path` may not be read as a part of a folder, or None; that it is missing is left to the reader."""
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(place) for place in places):
        return f"{path} is a link to {target}, outside of {folder}; put a copy there if you want it to be used"
    if target.exists() and not target.is_file() and not target.is_dir():
        return f"{path} is a pipe, socket or device, not a file; remove it"
    return None
