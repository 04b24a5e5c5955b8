"""The contract of rollout backends as tests, for built-in and custom ones.

Subclass `BackendContract` in a test file and run it with pytest:

    from my_backend import MyBackend  # registers it
    from rlvla.rollout.testing import BackendContract

    class TestMyBackend(BackendContract):
        backend_class = MyBackend

        @pytest.fixture(scope="class")
        @classmethod
        def folder(cls, tmp_path_factory):
            return write_some_policy(tmp_path_factory.mktemp("policy") / "start")
"""
# ruff: noqa: D102 (the test names state the requirements)

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from rlvla.models.config import ActorConfig
from rlvla.models.families import check_checkpoint
from rlvla.models.policy import Decision
from rlvla.models.testing import PolicyContract
from rlvla.rollout.backends import RolloutBackend
from rlvla.rollout.config import BackendConfig, BackendSetup

_ENDING_S = 60.0  # timeout for processes to end
_PLAYING_S = 60.0  # timeout for weights to be loaded
_ROUNDS = 12
_CASES = PolicyContract()  # observations and random numbers


class BackendContract:
    """Tests of one backend with one policy; override `backend_class` and `folder` in a subclass named `Test...`.

    Attributes:
        backend_class: the backend.
        flags: its flags.
        setup_options: further fields of its `BackendSetup`.
        config: adapters and memory options of the policy.
        tolerance: absolute, of log-probs against the policy in training.
    """

    backend_class: ClassVar[type[RolloutBackend]]
    flags: ClassVar[Mapping[str, Any]] = {}
    setup_options: ClassVar[Mapping[str, Any]] = {}
    config: ClassVar[ActorConfig] = ActorConfig()
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The checkpoint folder."""
        raise NotImplementedError("override the fixture `folder`")

    @pytest.fixture(scope="class")
    @classmethod
    def policy(cls, folder: Path) -> Any:
        """The policy in training."""
        torch.manual_seed(0)
        return check_checkpoint(folder).load_policy(cls.config).eval()  # type: ignore[attr-defined]

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, policy: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutBackend]:
        """The backend; closed twice afterwards, when no process may be left."""
        options = {"folder": tmp_path_factory.mktemp("run"), **cls.setup_options}
        setup = BackendSetup(BackendConfig(**cls.flags), check_checkpoint(folder), cls.config, **options)
        assert cls.backend_class.problems(setup) == []
        backend = cls.backend_class(policy, setup)
        try:
            assert backend.version == backend.newest == -1
            backend.load(policy, 0)
            assert backend.in_process or backend.pids
            yield backend
        finally:
            pids = list(backend.pids)
            backend.close()
        backend.close()
        assert _ended(pids), "processes of the backend have not ended"
        with pytest.raises(Exception):  # noqa: B017 (any error)
            decide(backend, 0)

    def version(self, backend: RolloutBackend) -> int:
        """An unused version."""
        return backend.newest + 1

    def test_it_describes_and_prepares_as_the_policy_does(self, backend: RolloutBackend, policy: Any) -> None:
        assert backend.spec == policy.spec
        images, proprio, _ = _CASES.observations(policy)
        prepared, state = backend.prepare(images, proprio)
        expected, expected_state = policy.prepare(images, proprio)
        np.testing.assert_array_equal(prepared, expected)
        assert (state is None) == (expected_state is None)
        if state is not None:
            np.testing.assert_array_equal(state, expected_state)

    @pytest.mark.parametrize("rows", [1, 6])
    @pytest.mark.parametrize("greedy", [False, True])
    def test_equal_noise_gives_equal_decisions(
        self, backend: RolloutBackend, policy: Any, rows: int, greedy: bool
    ) -> None:
        backend.load(policy, version := self.version(backend))
        decision = decide(backend, 1, rows, greedy=greedy)
        assert decision.version == version
        assert_close(decision, decide(policy, 1, rows, greedy=greedy), self.tolerance)

    def test_log_probs_are_those_of_the_policy_in_training(self, backend: RolloutBackend, policy: Any) -> None:
        backend.load(policy, self.version(backend))
        decision = decide(backend, 2)
        scored = _CASES.log_probs(policy, _CASES.batch(policy, decision.trace))
        np.testing.assert_allclose(decision.log_probs, scored.numpy(), atol=self.tolerance, rtol=0)

    def test_weights_are_copied_and_new_ones_take_effect_at_once(self, backend: RolloutBackend, policy: Any) -> None:
        backend.load(policy, version := self.version(backend))
        before = decide(policy, 3)
        with other_weights(policy):
            changed = decide(policy, 3)
            assert not close(changed, before, self.tolerance), "other weights must lead to other decisions"
            decision = decide(backend, 3)
            assert decision.version == version
            assert_close(decision, before, self.tolerance)
            backend.load(policy, version + 1)
            assert (backend.version, backend.newest) == (version + 1, version + 1)
            decision = decide(backend, 3)
            assert decision.version == version + 1
            assert_close(decision, changed, self.tolerance)

    def test_staged_weights_wait_to_be_asked_for(self, backend: RolloutBackend, policy: Any) -> None:
        backend.load(policy, version := self.version(backend))
        before = decide(policy, 4)
        with other_weights(policy):
            backend.stage(policy, version + 1)
        with other_weights(policy, seed=1):
            last = decide(policy, 4)
            backend.stage(policy, version + 2)  # replaces the staged weights
        assert (backend.version, backend.newest) == (version, version + 2)
        decision = decide(backend, 4)
        assert decision.version == version
        assert_close(decision, before, self.tolerance)
        for _ in range(2):  # the second time there are no new weights
            backend.renew()
            assert (backend.version, backend.newest) == (version + 2, version + 2)
            decision = decide(backend, 4)
            assert decision.version == version + 2
            assert_close(decision, last, self.tolerance)

    def test_the_noise_level_can_be_set(self, backend: RolloutBackend, policy: Any) -> None:
        if not policy.spec.anneals_noise:
            pytest.skip("the policy has no noise level")
        backend.load(policy, self.version(backend))
        before, start = decide(policy, 5), policy.anneal_noise(0.05, 0.0)
        try:
            policy.anneal_noise(0.05, 1.0)
            backend.anneal_noise(0.05, 1.0)
            changed = decide(policy, 5)
            assert not close(changed, before, self.tolerance)
            assert_close(decide(backend, 5), changed, self.tolerance)
        finally:
            assert policy.anneal_noise(0.05, 0.0) == start
            backend.anneal_noise(0.05, 0.0)
        assert_close(decide(backend, 5), before, self.tolerance)

    def bad_observations(self, policy: Any) -> tuple[Any, Any, Any]:
        """Observations that make the policy raise an error."""
        images, proprio, instructions = _CASES.prepared(policy)
        return images, proprio, [len(text) for text in instructions]

    def test_an_error_is_raised_with_its_traceback_and_the_next_decision_is_made(
        self, backend: RolloutBackend, policy: Any
    ) -> None:
        backend.load(policy, self.version(backend))
        arguments, noise = self.bad_observations(policy), _CASES.noise(policy)
        with pytest.raises(Exception) as expected:
            policy.act(*arguments, noise=noise, temperature=1.0)
        with pytest.raises(Exception) as caught:
            backend.act(*arguments, noise=noise, temperature=1.0)
        text = f"{caught.value}\n{caught.getrepr(style='native')}"
        assert str(expected.value) in text and expected.traceback[-1].name in text
        assert_close(decide(backend, 6), decide(policy, 6), self.tolerance)

    def test_each_decision_is_that_of_its_version_while_another_thread_brings_weights(
        self, backend: RolloutBackend, policy: Any
    ) -> None:
        backend.load(policy, first := self.version(backend))
        expected, last = {first: decide(policy, 7)}, first + _ROUNDS
        for version in range(first + 1, last + 1):
            with other_weights(policy, seed=version):
                expected[version] = decide(policy, 7)
        decisions: list[Decision] = []
        versions: list[int] = []

        def play() -> None:
            deadline = time.monotonic() + _PLAYING_S
            while (not versions or versions[-1] < last) and time.monotonic() < deadline:
                backend.renew()
                decisions.append(decide(backend, 7))
                versions.append(decisions[-1].version or 0)
                backend.metrics()

        with _hasty_threads(), ThreadPoolExecutor(1) as pool:
            playing = pool.submit(play)
            for version in range(first + 1, last + 1):
                with other_weights(policy, seed=version):
                    (backend.stage if version % 2 else backend.load)(policy, version)
            playing.result()
        assert versions == sorted(versions) and versions[-1] == last == backend.version
        for decision, version in zip(decisions, versions):
            assert_close(decision, expected[version], self.tolerance)

    def test_metrics_have_the_same_names_each_time(self, backend: RolloutBackend, policy: Any) -> None:
        first = backend.metrics()
        backend.load(policy, self.version(backend))
        assert backend.metrics().keys() == first.keys()


def decide(policy: Any, seed: int, rows: int = 6, *, greedy: bool = False) -> Decision:
    """Decisions on some observations, by a policy or by a backend."""
    images, proprio, instructions = _CASES.prepared(policy, rows)
    if greedy and not policy.spec.greedy_noise:
        return policy.act(images, proprio, instructions, noise=None, temperature=1.3)
    options = {"greedy": True} if greedy else {}
    noise = _CASES.noise(policy, rows, seed)
    return policy.act(images, proprio, instructions, noise=noise, temperature=1.3, **options)


def close(actual: Decision, expected: Decision, tolerance: float) -> bool:
    """Whether two batches of decisions agree."""
    return all(
        one.shape == other.shape and np.allclose(one, other, atol=tolerance, rtol=0)
        for one, other in _array_pairs(actual, expected)
    )


def assert_close(actual: Decision, expected: Decision, tolerance: float) -> None:
    """Assert that two batches of decisions agree."""
    assert actual.trace.keys() == expected.trace.keys()
    for one, other in _array_pairs(actual, expected):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)


def _array_pairs(one: Decision, other: Decision) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs = [(one.actions, other.actions), (one.log_probs, other.log_probs)]
    return pairs + [(one.trace[name], other.trace[name]) for name in sorted(one.trace.keys() & other.trace.keys())]


@contextmanager
def other_weights(policy: nn.Module, seed: int = 0) -> Iterator[None]:
    """Perturb all trained weights within the block."""
    generator = torch.Generator().manual_seed(seed)
    trained = [p for p in policy.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(trained, before):
                parameter.copy_(value)


@contextmanager
def _hasty_threads() -> Iterator[None]:
    """Switch threads very often within the block, to expose races."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + _ENDING_S
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
