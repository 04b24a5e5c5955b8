"""torch, imported at its first use.

`--help` lists the options of estimators and losses and must not wait for torch, so their modules import it from here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

F = TypeVar("F", bound=Callable)

if TYPE_CHECKING:
    import torch
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self.__name__), name)

    torch = _Lazy("torch")


def no_grad(function: F) -> F:
    """`torch.no_grad` as a decorator that does not import torch."""

    @functools.wraps(function)
    def without_gradient(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return without_gradient  # type: ignore[return-value]
