"""The collective operations of a single process, for scripts that use no DeepSpeed."""

from __future__ import annotations

from typing import Any, ClassVar


class OneProcess:
    """What evaluations ask of a `DeepspeedStrategy`, where there is one process."""

    rank: ClassVar[int] = 0
    world_size: ClassVar[int] = 1
    is_main: ClassVar[bool] = True

    def any(self, condition: bool) -> bool:
        """The condition."""
        return condition

    def gather_objects(self, item: Any) -> list[Any]:
        """The item in a list."""
        return [item]
