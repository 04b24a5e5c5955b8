"""What is away while episodes are played, when it comes back, and that nothing is changed by it.

There is no accelerator here: states move from the memory of the host to the memory of the host.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.train_ppo_vla import main as train
from rlvla.commands import ppo_checks
from rlvla.models.value_models import REWARD_HEAD_FILE, RewardModel
from rlvla.rollout import RolloutEngine
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.models import HOST, Models, Offloading
from rlvla.trainer.updater import UpdatePhase
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine, OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

FLAGS = [
    *("--num_episodes", "8", "--rollout_batch_size", "4", "--train_batch_size", "2", "--num_envs", "1"),
    *("--eval_episodes", "2", "--no-val_before_train", "--max_steps", "24", "--no-use_tensorboard"),
    # a machine that pays for coming near gives every run a gradient
    *("--reward", "success", "rm:0.5", "--rm_formula", "F(near)", "--temperature", "1.5"),
    *("--init_kl_coef", "0.1", "--actor_learning_rate", "1e-3", "--deterministic_rollout", "--save_steps", "1"),
]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_is_the_same_to_the_bit(policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ZeRO-3, whose moments are moved here; below those of each stage."""
    monkeypatch.setattr(ppo_checks, "has_accelerator", lambda: True)
    for name, more in (("stays", []), ("offloaded", ["--offload_during_rollout"])):
        folder = str(tmp_path / name)
        train(["--pretrain", str(policy_folder), "--save_path", folder, *FLAGS, "--zero_stage", "3", *more])
    runs = tmp_path / "stays", tmp_path / "offloaded"
    one, other = (load_file(run / "policy" / "model.safetensors") for run in runs)
    assert all(torch.equal(one[key], other[key]) for key in one)
    start = load_file(policy_folder / "model.safetensors")
    assert any(not torch.equal(one[key], start[key]) for key in one)
    # The checkpoint holds the moments and master weights of both engines.
    files = [sorted((run / "checkpoints" / "iteration_000002").glob("*/*optim_states.pt")) for run in runs]
    assert [file.parent.name for file in files[0]] == ["actor", "critic"]
    for left, right in zip(*files):
        assert_equal(*(torch.load(file, weights_only=False) for file in (left, right)))


def assert_equal(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_equal(left, right)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_an_engine_moves(stage: int, bf16: bool) -> None:
    torch.manual_seed(0)
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage, bf16=bf16))
    engine = strategy.prepare(torch.nn.Linear(3, 2), OptimConfig(0.1, (0.9, 0.999), 0.0, "constant", 0.0, 10))
    engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16 if bf16 else None)).sum(), last=True)
    optimizer = engine.engine.optimizer
    moments = [v for state in optimizer.optimizer.state.values() for k, v in state.items() if k != "step"]
    assert len(moments) == 2 * len(optimizer.optimizer.state) > 0
    if stage == 3:  # on a device that keeps no numbers one sees that they have left
        engine._move_moments(torch.device("meta"))
        now = [v for state in optimizer.optimizer.state.values() for k, v in state.items() if k != "step"]
        assert all(moment.is_meta for moment in now)
        return
    masters, weights = optimizer.single_partition_of_fp32_groups, list(engine.module.parameters())
    before = [tensor.data_ptr() for tensor in (*masters, *weights)]
    values = [tensor.detach().clone() for tensor in (*masters, *weights)]
    engine.offload_states(weights=True)
    assert {kind.value for kind in optimizer.offloaded_states} == {"optim_states", "hp_params", "lp_params"}
    assert not set(before) & {tensor.data_ptr() for tensor in (*masters, *weights)}, "pinned copies"
    engine.reload_states()
    assert not optimizer.offloaded_states
    assert all(torch.equal(a, b) for a, b in zip(values, (*masters, *engine.module.parameters())))
    engine.reload_states()  # nothing is away: nothing happens


def test_the_order_of_things(policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away before episodes are played, the reward model there to judge them, the rest back before it is used."""
    monkeypatch.setattr(ppo_checks, "has_accelerator", lambda: True)
    reward = RewardModel.from_policy(policy_folder)
    reward.save_pretrained(tmp_path / "reward")
    assert (tmp_path / "reward" / REWARD_HEAD_FILE).is_file()
    seen: list[str] = []

    def record(owner: type, name: str, label: str) -> None:
        before = getattr(owner, name)

        def call(self, *args, **kw):
            seen.append(label)
            return before(self, *args, **kw)

        monkeypatch.setattr(owner, name, call)

    record(Engine, "offload_states", "engine away")
    record(Engine, "reload_states", "engine back")
    record(RolloutEngine, "run", "play")
    record(ExperienceMaker, "make", "experience")
    record(UpdatePhase, "run", "update")
    record(RewardModel, "success_probability", "judge")
    moved, to = DeepspeedStrategy.move_frozen, RewardModel.to

    def move(self, model, device) -> None:  # here both places are the host
        seen.append("reference away" if device is HOST else "reference back")
        moved(self, model, device)

    def send(self, device) -> RewardModel:
        seen.append("reward model away" if device == "cpu" else "reward model there")
        return to(self, device)

    monkeypatch.setattr(DeepspeedStrategy, "move_frozen", move)
    monkeypatch.setattr(RewardModel, "to", send)
    flags = [*FLAGS, "--num_episodes", "4", "--zero_stage", "2", "--reward_pretrain", str(tmp_path / "reward")]
    train(["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *flags, "--offload_during_rollout"])
    away = ["engine away", "engine away", "reference away"]
    back = ["engine back", "engine back", "reference back"]
    training = [*away, "play", "reward model there", "judge", "reward model away", *back, "experience", "update"]
    assert seen == [*training, *away, "play", *back], "an iteration, then the evaluation at the end"


class Recorder:
    """An engine, or a strategy, that writes down what happens to it."""

    device = torch.device("cuda", 0)

    def __init__(self, seen: list[tuple]):
        self.seen = seen

    def offload_states(self, **options: bool) -> None:
        self.seen.append(("away", options))

    def reload_states(self) -> None:
        self.seen.append(("back",))

    def move_frozen(self, model: object, device: torch.device) -> None:
        self.seen.append((model, str(device)))


class Reference:
    without_adapters, actor = False, "reference"


def test_everything_is_back_after_an_error() -> None:
    actor, critic, moved = [], [], []
    engines = {"actor": Recorder(actor), "critic": Recorder(critic)}
    parts = (engines, Models(None, None, Reference()), Recorder(moved))

    def play() -> None:
        with Offloading(True, *parts).during_rollout():
            assert (actor, critic) == ([("away", {"weights": False})], [("away", {"weights": True})])
            assert moved == [("reference", "cpu")]
            raise RuntimeError("simulator")

    with pytest.raises(RuntimeError, match="simulator"):
        play()
    assert actor[1:] == critic[1:] == [("back",)] and moved[1:] == [("reference", "cuda:0")]
    with Offloading(False, *parts).during_rollout():
        pass
    assert len(actor) == len(critic) == len(moved) == 2
