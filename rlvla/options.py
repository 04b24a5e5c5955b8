"""Command-line options declared beside the code that reads them, and registries of code that is selected by name.

`arg` makes a dataclass field a flag. An entry of a `Registry` (an advantage estimator, a policy loss, a learner, a
reward source) names the dataclass of its options when it is registered; the fields become flags of the commands that
select from the registry. Nothing here imports torch, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable)
C = TypeVar("C")


def arg(default: Any, help: str | Callable[[], str], **metadata: Any) -> Any:
    """A dataclass field that is also a flag.

    Args:
        default: the default value; a tuple makes a flag that takes several values.
        help: one sentence that names the unit; the parser appends the default. A function is called when the parser is
            built, for texts that list registered names.
        metadata: `choices` (or a function that returns them when a parser is built), `metavar`, `nargs`, `action` as
            in argparse; `value`, the metavar of a switch's optional value; `minimum`, `maximum` (inclusive) and
            `above`, `below` (exclusive bounds); `check` = (predicate, remedy) for a whole value other than the
            default; `at_most`, the field of the same dataclass that bounds this one from above; `flag` is the name of
            the flag if it differs from that of the field, `aliases` are exact synonyms; `essential=True` if `--help`
            alone shows the flag; `of` = (kind, *names) puts it in a group of its own, e.g. ("reward", "vlm");
            `read_if`, the `Condition`s (one, or a tuple) under which the flag has an effect; `argument`, the keyword
            argument of a registered function that the option sets, if it has another name; `lines=True` allows line
            breaks in a text; `writes` ("file" or "folder") marks an output, which must be writable. `recorded=False`:
            see `rlvla.envs.options.SuiteOptions`.
    """
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class Condition:
    """When a flag has an effect.

    Attributes:
        holds: from the values of all flags of a command, by name.
        otherwise: why the flag has no effect if it does not hold; `{name}` is replaced by the value of a flag.
    """

    holds: Callable[[Mapping[str, Any]], bool]
    otherwise: str


def switched_on(name: str) -> Condition:
    """The switch --name is on."""
    return Condition(lambda flags: bool(flags.get(name)), f"it belongs to --{name}, which is off")


def given(name: str) -> Condition:
    """--name has a value other than None, 0 and empty."""
    return Condition(lambda flags: bool(flags.get(name)), f"no effect without --{name}")


def equals(name: str, *values: Any) -> Condition:
    """--name has one of these values."""
    return Condition(lambda flags: flags.get(name) in values, f"--{name} is {{{name}}}")


@dataclass(frozen=True)
class Options:
    """Base of the options of registered functions, which receive them as keyword arguments.

    Any options may have a method `problems() -> list[Problem]` for values that do not fit together; each value is then
    within its bounds.
    """

    def arguments(self) -> dict[str, Any]:
        """Keyword argument -> value."""
        return {f.metadata.get("argument", f.name): getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True)
class Entry(Generic[F]):
    """An entry of a registry.

    Attributes:
        target: the function or class.
        options: dataclass of its options, or None.
        attributes: facts about the entry that its users rely on, e.g. `per_episode`.
    """

    target: F
    options: type | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Registry(Generic[F]):
    """Functions or classes of one kind, by name.

    Args:
        kind: noun for messages and the title of the group of flags ("policy loss").
        flag: the flag that selects an entry, without dashes; None if no single one does.
        package: package whose modules register the built-in entries; all are imported when names are listed.
        modules: module -> names that it registers; imported when one of the names is requested.
        declared: name -> dataclass of the options of an entry in `modules`, so that these need not be imported for it.
        defaults: attributes of entries that do not set them.
        selection: values of all flags -> names of the entries in use; default: the value of `flag`.
        unused: names of unused entries -> why their options have no effect; `{name}` as in `Condition.otherwise`.
    """

    def __init__(
        self,
        kind: str,
        *,
        flag: str | None = None,
        package: str | None = None,
        modules: Mapping[str, Sequence[str]] | None = None,
        declared: Mapping[str, type] | None = None,
        defaults: Mapping[str, Any] | None = None,
        selection: Callable[[Mapping[str, Any]], Collection[str]] | None = None,
        unused: Callable[[Sequence[str]], str] | None = None,
    ):
        self.kind, self.flag = kind, flag
        self.selection = selection or (lambda flags: {flags[str(flag)]})
        self.unused = unused or (lambda owners: f"--{flag} {{{flag}}} does not use it")
        self._package, self._declared, self._defaults = package, dict(declared or {}), dict(defaults or {})
        self._complete = False  # whether the modules of the package have been imported
        self._entries: dict[str, Entry[F]] = {}
        self._modules = {name: module for module, names in (modules or {}).items() for name in names}

    def register(self, name: str, *, options: type | None = None, **attributes: Any) -> Callable[[F], F]:
        """Decorator that registers a function or class under `name`.

        Loading the same source file again replaces its entries; the name of another function is an error. A user's
        function without `options` has those of the built-in entry with which it shares the most keyword parameters.

        Raises:
            ValueError: the name is empty or taken by another function, or an attribute is unknown.
        """
        if not name:
            raise ValueError(f"a {self.kind} needs a non-empty name")
        unknown = sorted(set(attributes) - set(self._defaults))
        if unknown:
            raise ValueError(f"{self.kind} {name!r}: unknown attribute(s) {', '.join(unknown)}")

        def decorate(target: F) -> F:
            before = self._entries.get(name) or (None if self._is_built_in(target) else self._imported(name))
            if before is not None and _origin(before.target) != _origin(target):
                owner = ".".join(_origin(before.target))
                raise ValueError(f"{self.kind} {name!r} already belongs to {owner}; register under another name")
            declared = options or self._declared.get(name) or self._inherited_options(target)
            self._entries[name] = Entry(target, declared, {**self._defaults, **attributes})
            return target

        return decorate

    def entry(self, name: str) -> Entry[F]:
        """The entry registered under `name`.

        Raises:
            ValueError: unknown name; the message lists the registered ones.
        """
        entry = self._entries.get(name) or self._imported(name)
        if entry is None:
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        return entry

    def get(self, name: str) -> F:
        """The function or class registered under `name`; ValueError as for `entry`."""
        return self.entry(name).target

    def options(self, name: str) -> type | None:
        """The dataclass of the options of an entry; ValueError as for `entry`."""
        if name in self._modules and name not in self._entries:
            return self._declared.get(name)
        return self.entry(name).options

    def attribute(self, name: str, attribute: str) -> Any:
        """An attribute of an entry; ValueError as for `entry`."""
        return self.entry(name).attributes[attribute]

    def parameters(self, name: str) -> frozenset[str]:
        """The keyword-only parameters of the function registered under `name`; ValueError as for `entry`."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        self._import_package()
        return sorted({*self._modules, *self._entries})

    def option_owners(self) -> dict[str, dict[str, dataclasses.Field]]:
        """Name of an option -> the entries that have it, with its field in the dataclass of their options."""
        owners: dict[str, dict[str, dataclasses.Field]] = {}
        for name in self.names():
            options: Any = self.options(name)
            for option in dataclasses.fields(options) if options else ():
                if "help" in option.metadata:
                    owners.setdefault(option.name, {})[name] = option
        return owners

    def _is_built_in(self, target: Callable) -> bool:
        return self._package is not None and target.__module__.startswith(f"{self._package}.")

    def _inherited_options(self, function: Callable) -> type | None:
        """The largest options of a built-in entry whose keyword arguments are all parameters of a user's function."""
        if self._package is None or self._is_built_in(function):
            return None
        built_in = [entry.options for entry in self._entries.values() if self._is_built_in(entry.target)]
        sizes = {options: options().arguments().keys() for options in built_in if options is not None}
        parameters = inspect.signature(function).parameters.keys()
        fitting = [options for options, arguments in sizes.items() if arguments <= parameters]
        return max(fitting, key=lambda options: len(sizes[options]), default=None)

    def _imported(self, name: str) -> Entry[F] | None:
        if name in self._modules:
            importlib.import_module(self._modules[name])
        else:
            self._import_package()
        return self._entries.get(name)

    def _import_package(self) -> None:
        if self._package is not None and not self._complete:
            self._complete = True
            for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
                importlib.import_module(f"{self._package}.{module.name}")


def unmet_condition(option: dataclasses.Field, flags: Mapping[str, Any]) -> str | None:
    """Why a flag has no effect, or None; `flags` are the values of all flags."""
    conditions = option.metadata.get("read_if", ())
    for condition in (conditions,) if isinstance(conditions, Condition) else conditions:
        if not condition.holds(flags):
            return condition.otherwise.format_map(flags)
    return None


def selected(registry: Registry) -> Any:
    """A dataclass field with the options of the entry that `registry.flag`, a field of the same dataclass, selects.

    None if the entry has no options. The fields of all registered options are flags. Give the dataclass
    `fill_selected(self)` as its `__post_init__`.
    """
    return field(default=None, metadata={"registry": registry})


def every(registry: Registry) -> Any:
    """A dataclass field with a tuple of the options of all entries of a registry, of which several may be in use.

    `options_of` finds those of an entry. See `selected` for the rest.
    """
    return field(default=None, metadata={"registry": registry, "every": True})


def registered_options(config: Any) -> list[Any]:
    """The options in the fields made by `selected` and `every`."""
    values = [getattr(config, option.name) for option in dataclasses.fields(config) if "registry" in option.metadata]
    return [
        options
        for value in values
        for options in (value if isinstance(value, tuple) else (value,))
        if options is not None
    ]


def flag_values(config: Any) -> Iterator[tuple[dataclasses.Field, Any]]:
    """The fields of a configuration that are flags, with their values, including registered options."""
    for part in (config, *registered_options(config)):
        for option in dataclasses.fields(part):
            if "help" in option.metadata:
                yield option, getattr(part, option.name)


def options_of(config: Any, registry: Registry, name: str) -> Any:
    """The options of an entry in the field made by `every`; None if it has none."""
    kind = registry.options(name)
    if kind is None:
        return None
    return next((options for options in registered_options(config) if type(options) is kind), None) or kind()


def fill_selected(config: Any) -> None:
    """Fill fields made by `selected` and `every` with the default options of entries whose options they lack."""
    for option in dataclasses.fields(config):
        if "registry" in option.metadata:
            value = getattr(config, option.name)
            present = {type(options): options for options in (value if isinstance(value, tuple) else (value,))}
            kinds = _option_types(option, lambda name: getattr(config, name))
            filled = [present[kind] if kind in present else kind() for kind in kinds]
            object.__setattr__(config, option.name, _field_value(option, filled))


def from_values(config: type[C], values: Mapping[str, Any]) -> C:
    """A configuration from values of flags by name, registered options included; other names are ignored."""
    options: dict[str, dataclasses.Field] = {option.name: option for option in dataclasses.fields(config)}  # type: ignore[arg-type]
    made = {name: values[name] for name in options if name in values}
    for name, option in options.items():
        if "registry" in option.metadata:
            kinds = _option_types(option, lambda flag: made.get(flag, options[flag].default))
            made[name] = _field_value(option, [from_values(kind, values) for kind in kinds])
    return config(**made)


def _option_types(option: dataclasses.Field, value_of: Callable[[str], Any]) -> list[type]:
    """The dataclasses of the options that a field made by `selected` or `every` holds."""
    registry = option.metadata["registry"]
    names = registry.names() if "every" in option.metadata else [value_of(registry.flag)]
    return [kind for kind in dict.fromkeys(map(registry.options, names)) if kind is not None]


def _field_value(option: dataclasses.Field, options: Sequence[Any]) -> Any:
    return tuple(options) if "every" in option.metadata else next(iter(options), None)


def keyword_arguments(options: Any, names: Collection[str]) -> dict[str, Any]:
    """The options as keyword arguments for a function with these parameters."""
    if options is None:
        return {}
    values = options.arguments() if isinstance(options, Options) else Options.arguments(options)
    return {name: value for name, value in values.items() if name in names}


def _origin(function: Callable) -> tuple[str, str]:
    return getattr(function, "__module__", "?"), getattr(function, "__qualname__", repr(function))
