"""Policy replicas without a cluster: weights as arrays, dividing batches, problems."""

from __future__ import annotations

import copy
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cli.train_ppo_vla import build_parser
from rlvla.commands.ppo_checks import backend_problems
from rlvla.commands.ppo_flags import PPORun
from rlvla.models.config import ActorConfig
from rlvla.models.families import check_checkpoint
from rlvla.models.policy import Decision
from rlvla.rollout.backends.actors import RolloutActors, _divided, _joined
from rlvla.rollout.backends.replica import ReceivedPolicy, pack, tensors_of, without_weights
from rlvla.rollout.config import BackendSetup
from rlvla.rollout.testing import assert_close, decide, other_weights
from rlvla.utils.cli.flags import no_effect_problems
from tests.support.flow_folders import write_flow

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Tied weights, several precisions, a scalar, a buffer, and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.plain = torch.tensor([7.0])


def arrived(policy: nn.Module) -> ReceivedPolicy:
    """The policy as in another process, with read-only weights."""
    received = ReceivedPolicy(without_weights(policy), CPU)
    packed = pack(tensors_of(policy), range(len(tensors_of(policy))))
    for *_, data in packed:
        data.setflags(write=False)
    received.load(packed)
    return received


def test_a_policy_arrives_without_its_weights_and_takes_them_in() -> None:
    policy = Tied()
    pickled = without_weights(policy)
    assert policy.first.weight.device == CPU and policy.second.weight is policy.first.weight
    assert all(tensor.is_meta for tensor in tensors_of(ReceivedPolicy(pickled, CPU).policy))
    there = arrived(policy).policy
    for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]:
        found = there.get_parameter(name) if name != "mask" else there.mask
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor)
    assert there.second.weight is there.first.weight and float(there.plain) == 7.0
    assert not any(parameter.requires_grad for parameter in there.parameters())


def test_parameters_are_not_copied_on_the_way_and_buffers_are() -> None:
    policy = Tied()
    received = ReceivedPolicy(without_weights(policy), CPU)
    packed = pack(tensors_of(policy), range(3))
    assert sum(data.nbytes for *_, data in packed) == 9 * 4 + 2 + 2
    received.load(packed)
    with torch.no_grad():
        policy.first.weight.fill_(5.0)
        policy.mask.fill_(True)
    assert received.policy.second.weight[0, 0] == 5.0, "it is the memory that was given"
    assert received.policy.mask.tolist() == [True, False]


@pytest.mark.parametrize("kind", ["adapters", "flow"])
def test_every_kind_of_policy_can_be_sent(kind: str, policy_folder: Path, tmp_path: Path) -> None:
    folder, config = (policy_folder, ActorConfig(lora_rank=2)) if kind == "adapters" else (tmp_path, ActorConfig())
    if kind == "flow":
        write_flow(tmp_path)
    policy = check_checkpoint(folder).load_policy(config).eval()  # type: ignore[attr-defined]
    received = arrived(policy)
    assert_close(decide(received.policy, 1), decide(policy, 1), 0.0)
    trained = [place for place, p in enumerate(policy.parameters()) if p.requires_grad]
    with other_weights(policy):
        received.load(copy.deepcopy(pack(tensors_of(policy), trained)))
        wanted = decide(policy, 1)
    assert_close(decide(received.policy, 1), wanted, 0.0)


@pytest.mark.parametrize(("rows", "members"), [(8, 3), (2, 4), (1, 1), (64, 7)])
def test_batches_are_divided_evenly(rows: int, members: int) -> None:
    parts = _divided(rows, members)
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) == min(rows, members) and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def flags(*given: str) -> PPORun:
    return PPORun.from_namespace(build_parser().parse_args(list(given)))


def test_problems_are_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nowhere = ["--rollout_backend", "actors", "--ray_address", f"127.0.0.1:{port}"]
    (problem,) = backend_problems(flags(*nowhere), None)
    assert (problem.flag, problem.reason) == ("ray_address", "unavailable") and "nothing answers" in problem.text
    assert backend_problems(flags(*nowhere, "--val_only"), None) == [], "an evaluation needs no replica"
    run = flags("--rollout_actors", "2")
    (problem,) = no_effect_problems(run.groups.values(), run.unselected, run.given)
    assert (problem.flag, problem.reason) == ("rollout_actors", "no_effect")
    monkeypatch.setitem(sys.modules, "ray", None)
    (problem,) = RolloutActors.problems(BackendSetup())
    assert (problem.flag, problem.reason) == ("rollout_backend", "unavailable") and "rlvla[ray]" in problem.text


def test_the_address_of_the_cluster_is_read_by_policies_as_well_as_by_workers() -> None:
    for backend, found in (("actors", []), ("colocated", ["ray_address"])):
        run = flags("--rollout_backend", backend, "--ray_address", "local")
        problems = run.workers.problems(None, policies_on_ray=run.policies_on_ray)
        assert [problem.flag for problem in problems] == found


def test_arrays_of_replicas_may_be_written_to() -> None:
    one = Decision(np.zeros((2, 1, 1)), np.zeros((2, 1)), {"tokens": np.zeros((2, 1), dtype=np.int64)}, 3)
    for array in (one.actions, one.log_probs, one.trace["tokens"]):
        array.setflags(write=False)
    joined = _joined([one], 3)
    joined.actions += 1
    joined.trace["tokens"] += 1
    assert joined.version == 3 and _joined([one, one], 3).log_probs.shape == (4, 1)


def test_modules_of_the_user_are_found_from_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = flags("--custom_module", "my/own.py", "--custom_module", "package.module")
    assert run.backend_setup(None).custom_modules == (str(tmp_path / "my" / "own.py"), "package.module")
