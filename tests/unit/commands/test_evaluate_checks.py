"""The protocols of an evaluation, from its flags."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlvla.commands.evaluate_checks import EvaluatedPolicy, JudgedSuccess, _protocols
from rlvla.envs.config import EnvConfig, SplitConfig, resolve_env
from rlvla.evaluation.config import EvalConfig
from rlvla.evaluation.protocol import describe_differences
from rlvla.evaluation.report import PolicyEvaluation
from rlvla.models.policy import PolicySpec
from rlvla.serving.client import RemoteCheckpoint
from rlvla.serving.config import RemoteConfig


def protocol(suite: str, **options: Any) -> dict[str, Any]:
    env = EnvConfig(task_suite_name=suite, task_ids=(0,), use_proprio=True, options=options)
    resolved, problems = resolve_env(env, SplitConfig(), 3)
    assert not problems
    setting: Any = SimpleNamespace(resolved=resolved)
    return _protocols(setting, EvalConfig(eval_episodes=3), JudgedSuccess(), {})["greedy"]


def test_results_of_a_remote_policy_are_those_of_its_chunk_and_keys() -> None:
    """An interrupted evaluation goes on only if they are the same."""

    def identity(length: int, keys: dict[str, str]) -> list[Any]:
        spec = PolicySpec(length, 2, length, noise_shape=(1,))
        remote = RemoteCheckpoint(spec, RemoteConfig(remote="ws://localhost:1"), ("front",), keys, {})
        return EvaluatedPolicy("ws://localhost:1", SimpleNamespace(checkpoint=remote), {}).identity

    first = identity(8, {"front": "image"})
    assert first == identity(8, {"front": "image"})
    assert first != identity(1, {"front": "image"}) and first != identity(8, {"front": "other"})


def test_options_and_perturbations_are_a_part_of_the_protocol() -> None:
    plain, other = protocol("maniskill", object_state=True), protocol("maniskill", physics="gpu")
    assert "options" not in plain and other["options"] == {"physics": "gpu"}
    assert describe_differences(plain, other) == ["physics: its default and gpu"]
    perturbed = protocol("metaworld", perturb=("light=1", "camera=1"))
    assert perturbed["perturb"] == ["camera=1", "light=1"] and "options" not in perturbed


@pytest.mark.parametrize("physics", ["cpu", "gpu"])
def test_an_earlier_file_has_the_options_of_its_environment(physics: str) -> None:
    now = protocol("maniskill", physics=physics)
    before = {name: value for name, value in now.items() if name != "options"}
    environment = EnvConfig(task_suite_name="maniskill", options={"physics": physics}).as_dict()
    content = {"policy": "p", "environment": environment, "protocols": {"greedy": before}, "results": []}
    assert describe_differences(now, PolicyEvaluation.from_dict(content).protocols["greedy"]) == []
