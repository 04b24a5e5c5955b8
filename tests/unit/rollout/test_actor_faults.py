"""Failures of policy replicas, with a fake cluster."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import ray.exceptions
from torch import nn

from rlvla.models.policy import Decision
from rlvla.rollout.backends import actors
from rlvla.rollout.backends.actors import ReplicaError, RolloutActors
from rlvla.rollout.config import BackendConfig, BackendSetup
from rlvla.utils.errors import ConfigError, RunEnded
from tests.support.fake_ray import FakeRay

SETUP = BackendSetup(BackendConfig(rollout_backend="actors", rollout_actors=2))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(actors, "ray_module", lambda: fake)
    monkeypatch.setattr(actors, "connect", lambda address: None)
    monkeypatch.setattr(actors, "least_busy_node", lambda taken: None)
    return fake


def loaded() -> tuple[RolloutActors, nn.Module]:
    policy = nn.Linear(2, 2)
    backend = RolloutActors(policy, SETUP)
    backend.load(policy, 0)
    return backend, policy


def act(backend: RolloutActors) -> Decision:
    return backend.act(np.zeros((4, 1)), None, ["lift"] * 4, noise=None, temperature=1.0)


def test_replicas_learn_where_code_lies_and_no_secret(cluster: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RLVLA_OF_THE_USER", "WANDB_API_KEY")
    for name in (*secrets, "HF_HUB_OFFLINE", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    loaded()
    variables = cluster.settings["runtime_env"]["env_vars"]
    assert not variables.keys() & set(secrets)
    assert variables["HF_HUB_OFFLINE"] == "1" and variables["PYTHONPATH"].endswith("1")


def test_a_cluster_that_one_rank_cannot_reach_is_reported_by_that_rank(
    cluster: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: str) -> None:
        raise ConfigError.of("ray_address", "unavailable", f"{address} is gone")

    monkeypatch.setattr(actors, "connect", connect)
    with pytest.raises(ConfigError, match="auto is gone") as caught:
        RolloutActors(nn.Linear(2, 2), SETUP)
    assert caught.value.one_rank and caught.value.problems[0].flag == "ray_address"


def test_a_policy_that_cannot_be_sent_is_a_mistake_in_the_configuration(cluster: FakeRay) -> None:
    policy = nn.Linear(2, 2)
    policy.lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to other processes: TypeError") as caught:
        RolloutActors(policy, SETUP)
    assert caught.value.problems[0].reason == "mismatch" and not cluster.actors


def test_replicas_that_have_started_are_ended_if_another_cannot_start(cluster: FakeRay) -> None:
    cluster.room = 1
    with pytest.raises(ray.exceptions.RaySystemError):
        RolloutActors(nn.Linear(2, 2), SETUP)
    assert len(cluster.actors) == 1 and cluster.killed == cluster.actors


def test_a_full_object_store_ends_the_run_with_a_remedy(cluster: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, policy = loaded()
    cluster.full = True
    remedy = "no room for 7 bytes.*--object-store-memory BYTES"
    with pytest.raises(RunEnded, match=f"cannot store the policy: .*{remedy}"):
        RolloutActors(policy, SETUP)
    for bring in (backend.load, backend.stage):
        with pytest.raises(RunEnded, match=f"cannot store the weights of the policy: .*{remedy}"):
            bring(policy, 1)
    assert act(backend).version == 0

    def full(*_: object) -> None:  # arrays of a call are stored as well
        cluster.put(0)

    for actor in cluster.actors:
        monkeypatch.setattr(actor, "_call", full)
    with pytest.raises(RunEnded, match=f"cannot store the observations: .*{remedy}"):
        act(backend)


def test_a_noise_level_that_a_replica_could_not_set_is_reported_until_it_could(cluster: FakeRay) -> None:
    backend, _ = loaded()
    cluster.fails.add("anneal_noise")
    backend.anneal_noise(0.1, 0.5)
    for _ in range(2):
        with pytest.raises(ReplicaError, match="anneal_noise has failed"):
            act(backend)
    cluster.fails.clear()
    backend.anneal_noise(0.1, 0.5)
    assert act(backend).version == 0
