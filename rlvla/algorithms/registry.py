"""Registry of functions by name, behind the estimator and loss flags."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable)


class Registry(Generic[F]):
    """Functions of one kind by name.

    Args:
        kind: what is registered, for error messages ("policy loss").
        shipped: module -> names that it registers. A module is imported when one of its names is first requested, so
            that names can be listed without torch.
    """

    def __init__(self, kind: str, shipped: Mapping[str, Sequence[str]] | None = None):
        self.kind = kind
        self._functions: dict[str, F] = {}
        self._homes = {name: module for module, names in (shipped or {}).items() for name in names}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that registers a function under `name`.

        Loading the same source file again replaces its entries; the name of another function is an error.

        Raises:
            ValueError: the name is empty or taken by another function.
        """
        if not name:
            raise ValueError(f"a {self.kind} needs a non-empty name")

        def decorate(function: F) -> F:
            known = self._find(name)
            if known is not None and _origin(known) != _origin(function):
                raise ValueError(
                    f"{self.kind} {name!r} already belongs to {'.'.join(_origin(known))}; register under another name"
                )
            self._functions[name] = function
            return function

        return decorate

    def get(self, name: str) -> F:
        """The function registered under `name`.

        Raises:
            ValueError: unknown name; the message lists the known ones.
        """
        function = self._find(name)
        if function is None:
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        return function

    def options(self, name: str) -> frozenset[str]:
        """The keyword arguments in the signature of the function registered under `name`.

        Raises:
            ValueError: unknown name; the message lists the known ones.
        """
        parameters = inspect.signature(self.get(name)).parameters.values()
        return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self._homes, *self._functions})

    def _find(self, name: str) -> F | None:
        if name not in self._functions and name in self._homes:
            importlib.import_module(self._homes[name])
        return self._functions.get(name)


def _origin(function: Callable) -> tuple[str, str]:
    return getattr(function, "__module__", "?"), getattr(function, "__qualname__", repr(function))
