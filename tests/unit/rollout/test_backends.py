"""Rollout backends: the contract for copies in this process, the registry, and the player of synchronous runs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from rlvla.models.config import ActorConfig
from rlvla.rollout.backends import register_rollout_backend
from rlvla.rollout.backends.colocated import PolicyCopy
from rlvla.rollout.config import ROLLOUT_BACKENDS
from rlvla.rollout.testing import BackendContract
from tests.support.flow_folders import write_flow


class TestTokens(BackendContract):
    backend_class = PolicyCopy

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, policy_folder: Path) -> Path:
        return policy_folder


class TestAdapters(TestTokens):
    config: ClassVar = ActorConfig(lora_rank=2)


class TestFlow(BackendContract):
    backend_class = PolicyCopy

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_flow(tmp_path_factory.mktemp("flow") / "policy")


def test_backends_are_registered_by_name() -> None:
    assert ROLLOUT_BACKENDS.get("colocated") is PolicyCopy

    @register_rollout_backend("test_of_my_own")
    class Own(PolicyCopy):
        pass

    assert ROLLOUT_BACKENDS.get("test_of_my_own") is Own and "test_of_my_own" in ROLLOUT_BACKENDS.names()
    with pytest.raises(ValueError, match="rollout backend 'colocated' already belongs to"):
        register_rollout_backend("colocated")(Own)
