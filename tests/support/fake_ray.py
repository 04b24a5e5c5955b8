"""A fake Ray cluster: actors are objects of this process, and each call is answered at once."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray.exceptions

from rlvla.models.policy import Decision
from rlvla.rollout.backends.replica import Place


@dataclass(eq=False)
class Ref:
    """An answer, or the exception that was raised instead."""

    value: Any


class Actor:
    """A replica that decides nothing; `fails` names methods that raise an error."""

    def __init__(self, fails: set[str]):
        self.fails, self.version = fails, -1

    def __getattr__(self, name: str) -> Any:
        if name not in ("begin", "load", "act", "anneal_noise"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *args, **options: self._call(name, args))

    def _call(self, name: str, args: tuple) -> Ref:
        if name in self.fails:
            return Ref(ray.exceptions.RayTaskError(name, f"{name} has failed", ValueError()))
        if name == "begin":
            return Ref(Place(1, "elsewhere", "here", "cpu"))
        if name == "load":
            self.version = args[0]
        rows = len(args[0]) if name == "act" else 0
        return Ref(Decision(np.zeros((rows, 1, 1)), np.zeros((rows, 1)), {}, self.version))


class FakeRay:
    """Stands for the module `ray`.

    Attributes:
        fails: names of the replica's methods that raise an error.
        full: nothing can be written to the object store.
        room: number of actors that can be started.
        actors, killed, settings: the actors that were started and those killed, and the options of the last one.
    """

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.full, self.room = False, 100
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.settings: dict[str, Any] = {}

    def put(self, value: Any) -> Ref:
        if self.full:
            raise ray.exceptions.ObjectStoreFullError("no room for 7 bytes")
        return Ref(value)

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def wait(self, refs: list[Ref], **_: Any) -> tuple[list[Ref], list[Ref]]:
        return refs, []

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, **settings: Any) -> Any:
        self.settings = settings
        return SimpleNamespace(remote=self._start)

    def _start(self, *_: Any) -> Actor:
        if len(self.actors) == self.room:
            raise ray.exceptions.RaySystemError("no more")
        self.actors.append(Actor(self.fails))
        return self.actors[-1]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")
