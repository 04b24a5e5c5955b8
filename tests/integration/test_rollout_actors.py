"""Replicas of the policy on a Ray cluster of two nodes: the contract of backends, lost processes, whole runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from cli.train_ppo_vla import main as train
from rlvla.models.config import ActorConfig
from rlvla.rollout.backends import actors
from rlvla.rollout.backends.actors import RolloutActors
from rlvla.rollout.testing import BackendContract, assert_close, decide, other_weights
from rlvla.utils.errors import RunEnded
from rlvla.utils.files import read_metrics
from tests.support.flow_folders import QUICK, write_flow
from tests.support.ray_cluster import TwoNodes, two_nodes
from tests.support.workers import is_running, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[TwoNodes]:
    with two_nodes() as nodes:
        yield nodes


class ActorsContract(BackendContract):
    backend_class = RolloutActors
    flags: ClassVar = {"rollout_backend": "actors", "rollout_actors": 2}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def address(cls, cluster: TwoNodes) -> None:
        cls.setup_options = {"ray_address": cluster.address}


class TestFlow(ActorsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_flow(tmp_path_factory.mktemp("flow") / "policy")

    def test_replicas_lie_on_both_nodes(self, backend: Any) -> None:
        places = [member.place for member in backend._members]
        assert len({place.node for place in places}) == 2 and len(set(backend.pids)) == 2
        assert all(map(is_running, backend.pids)) and os.getpid() not in backend.pids

    def test_a_killed_replica_is_replaced_and_its_part_decided_by_another(self, backend: Any, policy: Any) -> None:
        backend.load(policy, version := self.version(backend))
        with other_weights(policy):
            backend.load(policy, version + 1)
            policy.anneal_noise(0.05, 1.0)
            backend.anneal_noise(0.05, 1.0)
            wanted = decide(policy, 7)
            backend.metrics()
            victim = backend.pids[0]
            os.kill(victim, signal.SIGKILL)
            found = decide(backend, 7)
            assert found.version == version + 1
            assert_close(found, wanted, self.tolerance)
            metrics = backend.metrics()
            assert metrics["rollout/replicas_replaced"] == 1 and metrics["rollout/decisions_repeated"] == 3
            while len(backend.pids) < 2:
                decide(backend, 7)
            assert victim not in backend.pids and wait_until_gone([victim])
            assert_close(decide(backend, 7), wanted, self.tolerance)
            assert [member.failures for member in backend._members] == [0, 0], "both have decided"
            policy.anneal_noise(0.05, 0.0)
            backend.anneal_noise(0.05, 0.0)

    def test_a_replica_may_be_lost_while_it_decides(self, backend: Any, policy: Any) -> None:
        backend.load(policy, self.version(backend))
        victim = backend.pids[0]
        os.kill(victim, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            decision = pool.submit(decide, backend, 8)
            assert not wait([decision], 0.5).done, "half of the batch is with a process that does nothing"
            os.kill(victim, signal.SIGKILL)
            assert_close(decision.result(120), decide(policy, 8), self.tolerance)

    def test_replicas_that_keep_ending_end_the_run(
        self, backend: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        while len(backend.pids) < 2:
            decide(backend, 9)
        monkeypatch.setattr(actors, "_MAX_FAILURES", 1)
        os.kill(backend.pids[0], signal.SIGKILL)
        with pytest.raises(RunEnded, match="ended 1 times without a decision; the last time: .*actor"):
            decide(backend, 9)


@pytest.mark.nightly
class TestAdapters(ActorsContract):
    """Of an OpenVLA policy with adapters only these are sent again."""

    flags: ClassVar = {"rollout_backend": "actors"}
    config: ClassVar = ActorConfig(lora_rank=2)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, policy_folder: Path) -> Path:
        return policy_folder

    def test_only_what_is_trained_is_sent_again(self, backend: Any, policy: Any) -> None:
        backend.metrics()
        backend.load(policy, self.version(backend))
        sent = sum(p.nbytes for p in policy.parameters() if p.requires_grad) + sum(b.nbytes for b in policy.buffers())
        assert backend.metrics()["rollout/weights_mb"] * 1e6 == pytest.approx(sent)
        assert sent < 0.5 * sum(p.nbytes for p in policy.parameters())


def trained(cluster: TwoNodes, start: Path, folder: Path, *more: str) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Weights and metrics of a run with one replica, or with none if no flags name the backend."""
    flags = [*QUICK, "--pretrain", str(start), "--save_path", str(folder), *more]
    if "actors" in more:
        flags += ["--ray_address", cluster.address]
    train(flags)
    metrics = [record for record in read_metrics(folder) if "actor/pg_loss" in record]
    return load_file(folder / "policy" / "model.safetensors"), metrics


def test_a_run_is_the_same_wherever_the_policy_plays(cluster: TwoNodes, tmp_path: Path) -> None:
    start = write_flow(tmp_path / "start")
    flags = ("--async_rollout", "--flow_noise_level_end", "0.1")
    here, _ = trained(cluster, start, tmp_path / "here", *flags)
    there, metrics = trained(cluster, start, tmp_path / "there", *flags, "--rollout_backend", "actors")
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
    assert [record["async/staleness_mean"] for record in metrics] == [0.0, 1.0]
    assert all(record["rollout/replicas_replaced"] == 0 for record in metrics)
    assert metrics[0]["rollout/weights_mb"] > 0


@pytest.mark.nightly
def test_a_run_whose_replica_is_killed_loses_nothing(
    cluster: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, calls = RolloutActors.act, []

    def killing(self: RolloutActors, *arguments: Any, **options: Any) -> Any:
        calls.append(self.version)
        if len(calls) == 3:
            os.kill(self.pids[0], signal.SIGKILL)
        return act(self, *arguments, **options)

    start = write_flow(tmp_path / "start")
    here, _ = trained(cluster, start, tmp_path / "here")
    monkeypatch.setattr(RolloutActors, "act", killing)
    there, metrics = trained(cluster, start, tmp_path / "there", "--rollout_backend", "actors")
    assert [record["rollout/replicas_replaced"] for record in metrics] == [1.0, 0.0]
    assert [record["async/staleness_max"] for record in metrics] == [0.0, 0.0]
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
