"""Replicas of the policy as actors of a Ray cluster (`--rollout_backend actors`)."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rlvla.envs.workers.processes import worker_environment
from rlvla.envs.workers.ray_cluster import account_of, address_problem, connect, least_busy_node, ray_module
from rlvla.models.policy import Decision, PolicySpec
from rlvla.rollout.backends.base import RolloutBackend, register_rollout_backend
from rlvla.rollout.backends.replica import Packed, Place, Replica, pack, tensors_of, without_weights
from rlvla.rollout.config import BackendSetup
from rlvla.utils.errors import ConfigError, MissingExtraError, Problem, RunEnded

log = logging.getLogger(__name__)

_START_S = 600.0  # for a process that imports torch and reads the policy, on a busy machine
_DECISION_S = 600.0  # a replica that takes longer hangs
_MAX_FAILURES = 3  # of a replica and its successors, without a decision between them
_MIN_CPU = 0.001
# The trainer's variables that are also set for replicas: they import what it imports. Others may be secret.
_FORWARDED = ("PYTHONPATH", "PYTHONSAFEPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class ReplicaError(RuntimeError):
    """A replica raised an exception; the message has its traceback."""


@dataclass(eq=False)
class _Member:
    """Handle of a replica.

    Attributes:
        actor: the actor.
        node: requested Ray node; None: left to Ray.
        begun: reference to its answer to `begin`.
        place: where it runs; None until it has begun.
        loading: reference to its answer to the last `load`.
        annealing: reference to its answer to the last `anneal_noise`; None: none, or verified.
        failures: processes that have ended in its place since its last decision.
    """

    actor: Any
    node: str | None
    begun: Any
    place: Place | None = None
    loading: Any = None
    annealing: Any = None
    failures: int = 0


@register_rollout_backend("actors")
class RolloutActors(RolloutBackend):
    """Replicas of a policy on other processes, GPUs or machines; see `RolloutBackend`.

    A batch is divided evenly among the replicas; with fewer rows than replicas, those on this node come first. If the
    process of a replica ends or hangs, it is replaced, and another one decides its rows. Weights pass through Ray's
    object store, which is shared memory on each node: they are written once and mapped by all replicas of a node. After
    the first time only trained weights are sent.

    Raises:
        ConfigError: the cluster cannot be reached, or the policy cannot be pickled.
        RunEnded: the policy cannot be stored on the cluster.
    """

    uses_ray: ClassVar[bool] = True

    def __init__(self, policy: nn.Module, setup: BackendSetup):
        self._policy: Any = policy
        self._setup = setup
        self._lock = threading.Lock()
        self.version = self.newest = -1
        self._fixed: list[int] = []  # indices of the parameters that were not trained at the first load
        self._weights: list[Any] = []  # references to the fixed and to the changing tensors
        self._staged: list[Any] | None = None
        self._noise: tuple[float, float] | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._members: list[_Member] = []
        try:
            connect(setup.ray_address)
            self._pickled = _stored(_pickled(policy), "the policy")
            self._here = ray_module().get_runtime_context().get_node_id()
            self._settings = self._actor_settings()
            for _ in range(setup.config.rollout_actors or 1):
                self._members.append(self._start(self._members))
        except BaseException as error:
            self.close()
            if isinstance(error, ConfigError):  # the other ranks may have reached the cluster
                raise ConfigError(error.problems, one_rank=True) from error
            raise

    @classmethod
    def problems(cls, setup: BackendSetup) -> list[Problem]:
        """A missing package, or a cluster that cannot be reached."""
        try:
            ray_module()
        except MissingExtraError as error:
            return [Problem("rollout_backend", "unavailable", f"--rollout_backend actors: {error}")]
        problem = address_problem(setup.ray_address)
        return [Problem("ray_address", "unavailable", problem)] if problem else []

    @property
    def spec(self) -> PolicySpec:
        """See `PolicySpec`."""
        return self._policy.spec

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RolloutPolicy.prepare`; in this process, as it needs no weights."""
        return self._policy.prepare(images, proprio)

    # ------------------------------------------------------------------ weights
    def load(self, policy: nn.Module, version: int) -> None:
        """Load weights for all further decisions; the first time it waits until all replicas have begun."""
        self._require_open()
        weights = self._put(policy)
        with self._lock:
            if self.version < 0:
                self._await_all()
            self._distribute(weights, version)

    def stage(self, policy: nn.Module, version: int) -> None:
        """Keep weights in shared memory for the next `renew`."""
        self._require_open()
        weights = self._put(policy)
        with self._lock:
            self._staged, self.newest = weights, version

    def renew(self) -> None:
        """Load the staged weights, if there are new ones."""
        with self._lock:
            if self._staged is not None:
                self._distribute(self._staged, self.newest)

    def _put(self, policy: nn.Module) -> list[Any]:
        """Write weights to the object store and return references; fixed parameters are written only once."""
        tensors = tensors_of(policy)
        trained = {index for index, tensor in enumerate(policy.parameters()) if tensor.requires_grad}
        first, fixed = self._weights[:1], self._fixed
        if not first or not trained.isdisjoint(fixed):
            self._fixed = fixed = [index for index, _ in enumerate(policy.parameters()) if index not in trained]
            first = [self._written(pack(tensors, fixed))]
        changing = sorted(set(range(len(tensors))) - set(fixed))
        return [*first, self._written(pack(tensors, changing))]

    def _written(self, packed: list[Packed]) -> Any:
        written = _stored(packed, "the weights of the policy")
        with self._lock:
            self._counts["weights"] += sum(data.nbytes for *_, data in packed)
        return written

    def _distribute(self, weights: list[Any], version: int) -> None:
        """Have all replicas load weights before their next decision."""
        new = weights if weights[0] not in self._weights else weights[1:]
        self._weights, self._staged, self.version, self.newest = weights, None, version, version
        for member in self._members:
            member.loading = member.actor.load.remote(version, *(new if member.loading is not None else weights))

    def anneal_noise(self, end: float, progress: float) -> None:
        """Set the noise level of further decisions."""
        with self._lock:
            self._noise = end, progress
            for member in self._members:
                member.annealing = member.actor.anneal_noise.remote(end, progress)

    # ---------------------------------------------------------------- decisions
    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        noise: np.ndarray | None,
        **options: Any,
    ) -> Decision:
        """See `RolloutPolicy.act`; decisions carry the version of the weights.

        Raises:
            ReplicaError: a replica raised an exception.
            RunEnded: a replica and its successors ended several times without a decision, or the observations cannot be
                sent.
        """

        def call(member: _Member, chunk: slice) -> Any:
            rows = (images[chunk], None if proprio is None else proprio[chunk], list(instructions[chunk]))
            with _storing("the observations"):
                return member.actor.act.remote(*rows, noise=None if noise is None else noise[chunk], **options)

        with self._lock:
            chunks = _divided(len(images), len(self._members))
            decided: dict[int, Decision] = {}  # by first row
            calls: dict[Any, tuple[_Member, slice]] = {}
            while len(decided) < len(chunks):
                started = decided.keys() | {chunk.start for _, chunk in calls.values()}
                for chunk in chunks:
                    if chunk.start not in started:
                        member = self._least_loaded([member for member, _ in calls.values()])
                        calls[call(member, chunk)] = member, chunk
                for answer in self._answered(calls):
                    member, chunk = calls.pop(answer)
                    decision = self._decision(answer, member)
                    if decision is None:
                        self._counts["repeated"] += chunk.stop - chunk.start
                    else:
                        decided[chunk.start] = decision
            return _joined([decided[chunk.start] for chunk in chunks], self.version)

    def _least_loaded(self, busy: Sequence[_Member]) -> _Member:
        """The replica with the fewest calls, preferably on this node; waits if none is ready."""
        while True:
            self._require_open()
            ready = [member for member in self._members if self._has_begun(member)]
            if ready:
                load = Counter(id(member) for member in busy)
                return min(ready, key=lambda m: (load[id(m)], m.place is None or m.place.node != self._here))
            self._await_one([member.begun for member in self._members])

    def _answered(self, calls: dict[Any, tuple[_Member, slice]]) -> list[Any]:
        """Calls that were answered or whose replica has ended; hung replicas are killed."""
        ready, _ = ray_module().wait(list(calls), num_returns=1, timeout=_DECISION_S)
        if not ready:
            for member, _ in calls.values():
                ray_module().kill(member.actor)
            return list(calls)
        return ready

    def _decision(self, answer: Any, member: _Member) -> Decision | None:
        """The answer of a replica; None if its process has ended and was replaced."""
        try:
            decision = self._result(answer, member)
            if decision.version != self.version:
                self._result(member.loading, member)  # raises the error of the load
                raise ReplicaError(f"decided by version {decision.version}, not {self.version}")
            if member.annealing is not None:
                self._result(member.annealing, member)
                member.annealing = None
        except _Ended as ended:
            self._replace(member, str(ended))
            return None
        member.failures = 0
        return decision

    # ---------------------------------------------------------------- processes
    def _start(self, others: Sequence[_Member]) -> _Member:
        """Start a replica on the least busy node."""
        ray, settings, node = ray_module(), dict(self._settings), None
        if not settings["num_gpus"]:
            node = least_busy_node(Counter(member.node or "" for member in others))
        settings["scheduling_strategy"] = "SPREAD"
        if node is not None:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            settings["scheduling_strategy"] = affinity(node, soft=True)
        actor = ray.remote(Replica).options(**settings).remote(self._setup.custom_modules)
        return _Member(actor, node, actor.begin.remote(self._pickled))

    def _actor_settings(self) -> dict[str, Any]:
        """Resources and environment of an actor: each has a GPU, or an equal share of one if there are too few."""
        gpus = ray_module().cluster_resources().get("GPU", 0.0)
        replicas = (self._setup.config.rollout_actors or 1) * self._setup.ranks
        share = 1.0 if gpus >= replicas else 1.0 / math.ceil(replicas / gpus) if gpus >= 1 else 0.0
        variables = {name: v for name, v in worker_environment({}).items() if name in _FORWARDED}
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
        # An actor without any resource would be placed at random. No restarts by Ray: a new process needs its weights
        # first.
        return {
            "num_cpus": 0 if share else _MIN_CPU,
            "num_gpus": share,
            "max_restarts": 0,
            "runtime_env": {"env_vars": variables},
        }

    def _has_begun(self, member: _Member) -> bool:
        """Whether a replica can decide; one that has ended before is replaced."""
        if member.place is None and ray_module().wait([member.begun], timeout=0)[0]:
            try:
                member.place = self._result(member.begun, member)
            except _Ended as ended:
                self._replace(member, str(ended))
        return member.place is not None

    def _await_all(self) -> None:
        while waiting := [member.begun for member in self._members if not self._has_begun(member)]:
            self._await_one(waiting)
        places = Counter(f"{m.place.host} ({m.place.device})" for m in self._members if m.place is not None)
        if self._setup.rank == 0:
            log.info("the policy plays on %s", ", ".join(f"{place} x {number}" for place, number in places.items()))

    def _await_one(self, begun: list[Any]) -> None:
        if not ray_module().wait(begun, num_returns=1, timeout=_START_S)[0]:
            free = {name: n for name, n in ray_module().available_resources().items() if name in ("CPU", "GPU")}
            raise RunEnded(
                f"no policy replica has started within {_START_S:g} s; each wants {self._settings['num_gpus']:g} GPUs, "
                f"and free on the Ray cluster are {free}; lower --rollout_actors, or add machines"
            )

    def _replace(self, member: _Member, account: str) -> None:
        """Replace a replica that has ended by a new process with the same weights."""
        self._require_open()
        if member not in self._members:  # replaced before: it had several chunks to decide
            return
        ray_module().kill(member.actor)  # in case only its answer was lost
        failures = member.failures + 1
        where = "on the Ray cluster" if member.place is None else f"on {member.place.host}"
        if failures >= _MAX_FAILURES:
            raise RunEnded(
                f"a policy replica {where} has ended {failures} times without a decision; the last time: {account}"
            )
        log.warning("a policy replica %s has ended and is replaced: %s", where, account)
        self._counts["replaced"] += 1
        new = self._start([other for other in self._members if other is not member])
        self._members[self._members.index(member)] = new
        new.failures = failures
        if self._weights:
            new.loading = new.actor.load.remote(self.version, *self._weights)
        if self._noise is not None:
            new.annealing = new.actor.anneal_noise.remote(*self._noise)

    def _result(self, answer: Any, member: _Member) -> Any:
        """The result of a call.

        Raises:
            _Ended: the process has ended, or lost its node.
            ReplicaError: it raised an exception.
        """
        ray = ray_module()
        try:
            return ray.get(answer, timeout=_DECISION_S)
        except ray.exceptions.RayTaskError as error:
            self._require_open()
            where = "on the Ray cluster" if member.place is None else f"on {member.place.host}"
            raise ReplicaError(f"a policy replica {where} raised an error:\n{error}") from error
        except ray.exceptions.RayError as error:
            raise _Ended(account_of(error)) from error

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the policy replicas are closed")

    def metrics(self) -> dict[str, float]:
        """Replicas replaced and decisions repeated since the last call, and MB of weights sent."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {
            "rollout/replicas_replaced": float(counts["replaced"]),
            "rollout/decisions_repeated": float(counts["repeated"]),
            "rollout/weights_mb": counts["weights"] / 1e6,
        }

    @property
    def pids(self) -> list[int]:
        """Processes of the replicas on this machine."""
        places = [member.place for member in self._members]
        return [place.pid for place in places if place is not None and place.host == socket.gethostname()]

    def close(self) -> None:
        """End all replicas; a decision in progress fails."""
        if self._closed:
            return
        self._closed = True
        if self._members and ray_module().is_initialized():  # else Ray has shut down with the process
            for member in self._members:
                ray_module().kill(member.actor)
        self._weights, self._staged, self._pickled = [], None, None


class _Ended(Exception):
    """The process of a replica has ended."""


def _pickled(policy: nn.Module) -> bytes:
    try:
        return without_weights(policy)
    except Exception as error:  # of any type, raised by the user's classes
        text = f"--rollout_backend actors: this policy cannot be sent to other processes: {error!r}"
        raise ConfigError.of("rollout_backend", "mismatch", text) from error


def _stored(value: Any, what: str) -> Any:
    """A reference to a value in the object store; RunEnded if it cannot be written."""
    with _storing(what):
        return ray_module().put(value)


@contextmanager
def _storing(what: str) -> Iterator[None]:
    """Turn Ray's errors about a full object store into RunEnded."""
    try:
        yield
    except ray_module().exceptions.RayError as error:
        raise RunEnded(
            f"--rollout_backend actors: Ray cannot store {what}: {account_of(error)}; if the object store of this "
            "machine is full, start Ray with a larger one (`ray start --object-store-memory BYTES`), or with a folder "
            "that has room for the rest (`--object-spilling-directory`)"
        ) from error


def _divided(rows: int, members: int) -> list[slice]:
    """Slices of nearly equal size, one per replica, or per row if there are fewer."""
    number = min(rows, members)
    bounds = [rows * index // number for index in range(number + 1)]
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:])]


def _joined(decisions: Sequence[Decision], version: int) -> Decision:
    """Concatenate batches of decisions into new arrays."""
    trace = {name: np.concatenate([one.trace[name] for one in decisions]) for name in decisions[0].trace}
    actions, log_probs = (np.concatenate([getattr(d, name) for d in decisions]) for name in ("actions", "log_probs"))
    return Decision(actions, log_probs, trace, version)
