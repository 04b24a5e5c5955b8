"""--dry_run: what it says is what a run does, and it starts nothing."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from benchmarks.memory_plan import OPTIM, compare, plan_for, probe_models, waiting_bytes
from benchmarks.random_policies import ACTIONS, new_policy, random_rows
from cli.train_ppo_vla import main as train
from cli.train_sft_vla import main as sft
from rlvla.data.reading import read_demonstrations
from rlvla.memory.plan import ZERO3_ELEMENTS, FrozenMemory, MemoryPlan, engine_memory, frozen_memory
from rlvla.memory.probe import Probe, probe
from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.families import RowShape, check_checkpoint
from rlvla.models.footprint import LiveBytes
from rlvla.models.reference import ReferenceModel
from rlvla.models.state_critic import StateCritic
from rlvla.models.value_models import Critic, RewardModel
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny
from rlvla.trainer.models import Models
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from tests.support.two_ranks import run

AMOUNTS = [
    "--num_episodes",
    "32",
    "--rollout_batch_size",
    "8",
    "--n_samples_per_prompt",
    "2",
    "--train_batch_size",
    "4",
]
AMOUNTS += ["--max_epochs", "3", "--micro_train_batch_size", "5"]
MIB = 2**20


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a dry run loads no weights, starts no workers and no engine")

    monkeypatch.setattr("rlvla.commands.runs.training.start_workers", fail)
    monkeypatch.setattr(DeepspeedStrategy, "__init__", fail)
    monkeypatch.setattr(OpenVLAForActionPrediction, "from_pretrained", fail)


def numbers(printed: str) -> dict[str, float]:
    """Rows of the tables."""
    found = {}
    for line in printed.splitlines():
        name, _, value = line.rpartition("  ")
        if value.replace(".", "").isdigit():
            found[name.strip()] = float(value)
    return found


def test_ppo(policy_folder: Path, tmp_path: Path, nothing_starts: None, capsys: pytest.CaptureFixture) -> None:
    flags = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *AMOUNTS]
    train([*flags, "--dry_run", "--max_steps", "16", "--freezing_actor_steps", "1", "--init_kl_coef", "0.1"])
    rows = numbers(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    assert rows["iterations"] == 2 and rows["episodes per iteration"] == 16
    assert rows["decisions per episode, at most"] == 4, "16 steps in chunks of 4"
    assert rows["optimizer steps per iteration"] == 16 / 4 * 3
    assert rows["optimizer steps of the actor"] == 12 and rows["optimizer steps of the critic"] == 24
    assert rows["micro-batches per optimizer step (accumulation), at most"] == 4, "16 decisions by 5"
    weights = sum(p.numel() for p in _actor(policy_folder).parameters()) * 4 / MIB
    for model in ("actor", "critic", "reference"):
        assert rows[f"{model}: weights"] == pytest.approx(weights, abs=0.11)
    assert rows["actor: optimizer states"] == pytest.approx(2 * weights, abs=0.11)
    held = 2 * 3 * weights + weights  # two trained models with moments, and the reference
    passing = max(rows[f"{model}: pass without gradients"] for model in ("actor", "critic", "reference"))
    assert rows["total on the device while they are scored"] == pytest.approx(held + passing, abs=0.5)
    decision = rows["decisions for a batch of observations"]
    assert rows["total on the device while episodes are played"] == pytest.approx(held + decision, abs=0.5)
    gradients, activations = (rows[f"actor: {part}"] for part in ("gradients", "activations of a micro-batch"))
    assert rows["total on the device at update, at most"] >= held + gradients + activations - 0.5


@pytest.mark.nightly
def test_copies_of_the_policy_count_where_they_are_in_this_process(
    policy_folder: Path, tmp_path: Path, nothing_starts: None, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("ray")
    flags = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *AMOUNTS, "--dry_run"]
    elsewhere, part = ["--rollout_backend", "actors", "--ray_address", "local"], "copy of the actor for rollouts"
    printed = []
    for more in ([], ["--async_rollout"], ["--async_rollout", *elsewhere], elsewhere):
        train([*flags, *more])
        printed.append(capsys.readouterr().out)
    plain, thread, *actors = map(numbers, printed)
    weights = thread[part]
    assert part not in plain and weights == pytest.approx(plain["actor: weights"], abs=0.11)
    total = "total on the device while episodes are played"
    assert thread[total] == pytest.approx(plain[total] + weights, abs=0.2)
    assert [part in rows for rows in actors] == [False, False] and [r[total] for r in actors] == [plain[total]] * 2
    note = "not counted: the policy of --rollout_backend actors"
    assert [note in text for text in printed] == [False, False, True, True]


def test_what_vllm_holds_of_this_device_is_named(
    tmp_path: Path, nothing_starts: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("rlvla.rollout.vllm.backend.interpreter_problems", lambda _: [])
    statistics = {"toy": {"action": {"q01": [-1.0] * 2, "q99": [1.0] * 2, "mask": [True] * 2}}}
    sizes = {"vision_dim": 16, "llm_dim": 32, "llm_layers": 1, "action_dim": 2}
    options = {"sentences": ["reach"], "dataset_statistics": statistics, "model_variant": "autoregressive"}
    policy = build_tiny(tmp_path / "policy", **options, **sizes)
    flags = ["--pretrain", str(policy), "--save_path", str(tmp_path / "run"), *AMOUNTS, "--dry_run"]
    train([*flags, "--task_suite_name", "toy_reach", "--rollout_backend", "vllm"])
    printed = capsys.readouterr().out
    assert "not counted: the policy of --rollout_backend vllm, which shares this device: the decoder's" in printed
    assert "in other processes" not in printed


def test_a_critic_on_the_state_is_planned_without_a_policys_network(
    policy_folder: Path, tmp_path: Path, nothing_starts: None, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *AMOUNTS, "--dry_run"]
    train([*flags, "--critic_input", "state"])
    rows, columns = numbers(capsys.readouterr().out), check_checkpoint(policy_folder).spec.columns
    weights = sum(p.numel() for p in StateCritic(1 + 2 + 2, columns).parameters()) * 4 / MIB  # toy_reach
    assert rows["critic: weights"] == pytest.approx(weights, abs=0.06)


def test_a_reward_model_of_another_family_is_planned(
    policy_folder: Path, demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    small = ["--pretrain", "compact", "--compact_channels", "8", "--compact_width", "16", "--max_steps", "1"]
    data = ["--demos", str(demos_file), "--train_batch_size", "8", "--no-use_tensorboard"]
    sft([*data, *small, "--save_path", str(tmp_path / "sft")])
    model = check_checkpoint(tmp_path / "sft" / "policy").load_reward_model(new=True)
    model.save_pretrained(tmp_path / "reward")
    capsys.readouterr()
    flags = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *AMOUNTS, "--dry_run"]
    train([*flags, "--reward", "rm_model:1", "--rm_model_path", str(tmp_path / "reward")])
    weights = sum(p.numel() for p in model.parameters()) * 4 / MIB
    assert numbers(capsys.readouterr().out)["rm_model: weights"] == pytest.approx(weights, abs=0.06)


@pytest.mark.nightly
def test_the_critic_is_planned_as_it_is_trained(
    policy_folder: Path, tmp_path: Path, nothing_starts: None, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *AMOUNTS, "--dry_run"]
    found = []
    for more in ([], ["--freeze_vision_backbone"], ["--gradient_checkpointing"], ["--lora_rank", "2"]):
        train([*flags, *more])
        found.append(numbers(capsys.readouterr().out))
    plain, frozen, recomputing, adapted = found
    part = "critic: optimizer states"
    assert frozen[part] < plain[part] and frozen[part] == pytest.approx(frozen["actor: optimizer states"], abs=0.11)
    assert adapted[part] == plain[part], "adapters are the actor's"
    part = "critic: activations of a micro-batch"
    assert recomputing[part] < plain[part]


def test_a_critic_of_its_own_is_planned_with_the_settings_of_the_run(
    policy_folder: Path, tmp_path: Path, nothing_starts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = {}

    def check(folder: Path, key: str | None = None, **more: object) -> object:
        read.update(more)
        return check_checkpoint(folder, key)

    monkeypatch.setattr("rlvla.commands.dry_run.check_checkpoint", check)
    flags = ["--pretrain", str(policy_folder), "--critic_pretrain", str(policy_folder), *AMOUNTS, "--dry_run"]
    train([*flags, "--save_path", str(tmp_path / "run"), "--model_variant", "oft"])
    assert read["overrides"]["model_variant"] == "oft"


@pytest.mark.nightly
def test_judges_and_demonstrations_of_ppo(
    policy_folder: Path,
    demos_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RewardModel.from_policy(policy_folder).save_pretrained(tmp_path / "reward")
    flags = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), "--dry_run", "--bf16"]
    flags += ["--advantage_estimator", "rloo", "--n_samples_per_prompt", "4", "--micro_train_batch_size", "8"]
    reward = str(tmp_path / "reward")

    def planned(*more: str) -> dict[str, float]:
        train([*flags, *more])
        return numbers(capsys.readouterr().out)

    plain = planned()
    judged = planned("--reward_pretrain", reward, "--reward", "rm_model:1", "--rm_model_path", reward)
    weights = judged["reward_model: weights"]
    assert weights == pytest.approx(plain["actor: weights"], abs=0.1)
    assert judged["rm_model: weights"] == pytest.approx(2 * weights, abs=0.15), "progress is computed in float32"
    own = [judged[f"{model}: pass without gradients"] for model in ("actor", "rm_model")]
    assert own[0] == plain["actor: pass without gradients"] and own[1] > own[0], "256 frames at once"

    demos = ["--ptx_coef", "0.1", "--ptx_demos", str(demos_file)]
    learned, more = planned(*demos, "--ptx_batch_size", "4"), planned(*demos, "--ptx_batch_size", "64")
    images = sum(images.nbytes for images in read_demonstrations(demos_file).images) / MIB
    assert learned["demonstrations (host)"] == pytest.approx(images, abs=0.1)
    part = "actor: activations of a micro-batch"
    assert more[part] == learned[part], "8 decisions at most, like those that were played"

    monkeypatch.setenv("WORLD_SIZE", "2")
    flags += ["--zero_stage", "3", "--init_kl_coef", "0.1"]
    shared = planned("--reward_pretrain", reward)
    assert shared["reference: weights"] == pytest.approx(weights / 2, abs=0.1)
    assert shared["reward_model: weights (host)"] == pytest.approx(weights, abs=0.1), (
        "whole, and away while others play"
    )
    assert shared["reward_model: gathered parameters"] == pytest.approx(weights, abs=0.1)
    away = planned("--param_offload", "--reward", "rm_model:1", "--rm_model_path", reward)
    for name in ("actor: weights", "reference: weights", "rm_model: weights"):
        assert f"{name} (host)" in away and name not in away


def _actor(folder: Path) -> torch.nn.Module:
    from rlvla.models.vla.checkpoint import check_weights, read_config

    with torch.device("meta"):
        return OpenVLAForActionPrediction(check_weights(OpenVLAForActionPrediction, folder, read_config(folder)))


def test_all_errors_at_once(policy_folder: Path, tmp_path: Path, nothing_starts: None, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        train(["--pretrain", str(policy_folder), "--dry_run", "--num_episodes", "7", "--adam_offload"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--num_episodes 7" in told and "--adam_offload needs" in told


@pytest.mark.parametrize("start", ["tiny", "compact", "checkpoint"])
def test_sft(
    demos_file: Path,
    policy_folder: Path,
    tmp_path: Path,
    nothing_starts: None,
    capsys: pytest.CaptureFixture,
    start: str,
) -> None:
    pretrain = str(policy_folder) if start == "checkpoint" else start
    flags = ["--demos", str(demos_file), "--pretrain", pretrain, "--save_path", str(tmp_path / "run"), "--dry_run"]
    flags += ["--ema_decay", "0.9"]
    sft([*flags, "--max_epochs", "2", "--train_batch_size", "64", "--micro_train_batch_size", "10"])
    rows = numbers(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    assert rows["episodes"] == 20 and rows["optimizer steps"] == 2 * (rows["decisions"] // 64)
    assert rows["micro-batches per optimizer step (accumulation)"] == 7
    trained = rows["policy: gradients"]
    assert rows["moving average of the actor"] == pytest.approx(trained, abs=0.11)
    assert 0 < trained <= rows["policy: weights"], "blocks that are not computed have none"
    assert rows["total on the device at update, at most"] > 4 * rows["policy: weights"]


def test_live_bytes_counts_each_storage_until_it_is_freed() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        view = a[10:].view(-1)
        assert live.now == 4000
        b = a + 1.0
        assert live.now == live.peak == 8000
        del b
        assert (live.now, live.peak) == (4000, 8000)
        del a
        assert live.now == 4000, "a view holds its storage"
        del view
        assert live.now == 0


def plan_of(world: int, **strategy: object) -> MemoryPlan:
    model = Probe(1000, 800, 4000, 100, 2000, 6000)
    return MemoryPlan({"actor": engine_memory(model, StrategyConfig(**strategy), world, accumulates=False)})


def test_sharing_out() -> None:
    """Optimizer states are shared out from stage 1 on, gradients from 2 on, parameters in 3."""
    engines = [plan_of(4, zero_stage=stage).engines["actor"] for stage in range(4)]
    assert [e.optimizer for e in engines] == [6400, 1600, 1600, 1600]
    assert [e.gradients for e in engines] == [3200, 3200, 800, 800]
    assert [e.weights for e in engines] == [4000, 4000, 4000, 1000]
    assert [e.gathered for e in engines] == [0, 0, 0, 4000]
    assert [e.master for e in engines] == [0, 800, 800, 800]
    offloaded = plan_of(4, zero_stage=2, adam_offload=True)
    assert offloaded.at_playing == 4000 and offloaded.on_host == 1600 + 3 * 800 + 2400
    assert offloaded.at_update == 4000 + 2 * 3200, "gradients and their copy; the step is on the host"
    assert offloaded.in_one_place().at_update == 4000 + 4000 + 2 * 3200


def test_bf16_halves_weights_and_buffers_but_not_the_sum_of_gradients() -> None:
    engines = [plan_of(4, zero_stage=stage, bf16=True).engines["actor"] for stage in range(4)]
    assert [e.gradients for e in engines] == [800, 800, 800, 800], "stages 0 and 1 run as 2"
    assert [e.master for e in engines] == [800, 800, 800, 800]
    assert [e.buffers for e in engines] == [1600, 1600, 1600, 1600]


def test_zero_3_brings_together_what_a_pass_needs_and_a_rollout_everything() -> None:
    size = 3 * ZERO3_ELEMENTS
    large = Probe(size, size, 4 * size, 100, 2000, 6000)
    judge = Probe(500, 0, 2000, 100, 0, 0)
    for offload in (False, True):
        strategy = StrategyConfig(zero_stage=3, param_offload=offload)
        engine = engine_memory(large, strategy, 2, accumulates=False)
        assert (engine.weights, engine.gathered, engine.whole) == (2 * size, 4 * ZERO3_ELEMENTS, 4 * size)
        frozen = frozen_memory(judge, strategy, 2)
        plan = MemoryPlan({"actor": engine}, {"reward": dataclasses.replace(frozen, source=True)})
        states = engine.master + engine.optimizer + engine.gradients + engine.buffers
        shares = 0 if offload else 2 * size + 1000
        assert plan.on_host == (2 * size + 1000 if offload else 0)
        judging = 2 * 2000  # gathered, and the buffer through which it came
        assert plan.at_playing == states + shares + 4 * size + judging, "the actor is whole while it is judged"
    for judges in (False, True):
        model = FrozenMemory(500, gathered=500, host=frozenset({"weights"}), source=True, judge=judges)
        passes = {"judge": 30, "reward": 900}
        waiting = MemoryPlan({}, {"judge": model}, passes=passes, decision=200)
        assert waiting.at_playing == (500 + 200 if judges else 500 + 30), "a judge is there while the policy decides"
        scored = {"judge": model, "reward": dataclasses.replace(model, judge=False)}
        both = MemoryPlan({}, scored, passes=passes, decision=200)
        assert both.at_playing == 500 + 900, "it has left when the episodes are scored"
    fine = dataclasses.replace(judge, small=200)
    kept = frozen_memory(fine, StrategyConfig(zero_stage=3), 2)
    assert (kept.at_rest, kept.gathered, kept.whole) == (1000 + 800, 1200, 1200), "small parameters stay whole"
    assert frozen_memory(fine, StrategyConfig(zero_stage=3), 1).at_rest == 2000
    one_rank = plan_of(1, zero_stage=3, param_offload=True)
    assert one_rank.engines["actor"].gathered == 4000 and one_rank.on_host == 4000
    assert plan_of(1, zero_stage=3).engines["actor"].gathered == 0, "all of it is there"


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_what_waits_on_the_host_while_episodes_are_played(policy_folder: Path, stage: int) -> None:
    """The bytes that DeepSpeed's engines hold of what `Offloading` sends away."""
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=stage))
    actor = Actor.from_pretrained(policy_folder)
    probes = probe_models(
        check_checkpoint(policy_folder), ActorConfig(), ["reach the red disc"], 2, bf16=False, judges=True
    )
    plan = plan_for(*probes, strategy.config, 1, accumulates=False)
    assert plan.away == 0
    plan.offloads = True
    engines = [strategy.prepare(model, OPTIM) for model in (actor, Critic.from_pretrained(policy_folder))]
    rows = random_rows(actor, 2)
    inputs = (actor.score(rows, 1.0), engines[1].module.score(rows))
    for engine, found in zip(engines, (engine(**given) for engine, given in zip(engines, inputs))):
        numbers = found["log_probs"] if isinstance(found, dict) else found
        engine.backward(numbers.mean(), last=True)  # makes the moments
    reference = ReferenceModel(Actor.from_pretrained(policy_folder))
    frozen = Models(actor, None, reference)
    assert plan.away == pytest.approx(waiting_bytes(dict(zip(("actor", "critic"), engines)), frozen), rel=0.01)
    playing, away = plan.at_playing, plan.away
    plan.offloads = False
    assert plan.at_playing == playing + away, "a reward model is where it was: it sees to itself"


@pytest.mark.nightly
@pytest.mark.slow
def test_plan_is_within_a_tenth_of_what_is_measured(tmp_path: Path) -> None:
    """Bytes of live tensors on one rank (ZeRO-3 on two, below); `benchmarks/memory_plan.py` has more of both.

    In bf16 with offloaded optimizer states, recomputing, several micro-batches, a reference and a reward model.
    """
    options = {"zero_stage": 2, "bf16": True, "adam_offload": True}, {"gradient_checkpointing": True}
    found = compare_variant(wide_policy(tmp_path), *options, 4, 2, True)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.1)


@pytest.mark.nightly
@pytest.mark.slow
def test_plan_of_a_compact_policy(tmp_path: Path) -> None:
    """Of its default size, with micro-batches whose activations count as much as its weights."""
    found = compare_variant(new_policy(tmp_path / "policy", "compact"), {"zero_stage": 2}, {}, 128, 128, True)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.1)


def wide_policy(folder: Path) -> Path:
    """2 M parameters in few layers: large tensors, and few operations to follow."""
    sizes = {"vision_dim": 96, "vision_depth": 2, "llm_dim": 256, "llm_mlp_dim": 768, "llm_layers": 1}
    numbers = {"toy": {"action": ACTIONS}}
    return build_tiny(folder, sentences=["reach the red disc"], dataset_statistics=numbers, **sizes)


def compare_variant(folder: Path, strategy: dict, actor: dict, rows: int, micro: int, judges: bool) -> dict[str, float]:
    """Planned / measured by phase."""
    amounts = {"rows": rows, "micro": micro, "judges": judges}
    return compare(folder, StrategyConfig(**strategy), ActorConfig(**actor), **amounts).ratios


def compare_on_a_rank(rank: int, folder: str) -> dict[str, float]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return compare_variant(Path(folder), {"zero_stage": 3}, {"lora_rank": 16}, 2, 2, False)


@pytest.mark.nightly
@pytest.mark.slow
def test_plan_of_two_ranks(tmp_path: Path) -> None:
    ratios, _ = run(compare_on_a_rank, str(wide_policy(tmp_path)))
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), abs=0.1)


@pytest.mark.nightly
def test_probe_sees_batch_size_and_recomputation(policy_folder: Path) -> None:
    real = Actor.from_pretrained(policy_folder)
    row, checkpoint = RowShape(1, 10), check_checkpoint(policy_folder)
    sketch = checkpoint.sketch(row, ActorConfig())
    recomputing = checkpoint.sketch(row, ActorConfig(gradient_checkpointing=True))
    amounts = {"bf16": False, "forward_rows": 4}
    few = probe(sketch, train_rows=4, **amounts)
    many = probe(sketch, train_rows=8, **amounts)
    lean = probe(recomputing, train_rows=8, **amounts)
    assert 1.8 < many.backward_bytes / few.backward_bytes < 2.2
    assert lean.backward_bytes < many.backward_bytes
    sizes = [(p.numel(), p.requires_grad) for p in real.parameters()]
    assert few.parameters == sum(n for n, _ in sizes) and few.trainable == sum(n for n, wanted in sizes if wanted)
    assert few.weight_bytes >= 4 * few.parameters
    assert few.small == few.parameters, "none of a tiny model is large"


def on_gpu(flags: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, float], str]:
    """The rows of a dry run, and its last line."""
    train([*flags, "--dry_run"])
    printed = capsys.readouterr().out
    return numbers(printed), printed.strip().splitlines()[-1]


@pytest.mark.nightly
def test_whether_a_run_fits_on_a_gpu(
    policy_folder: Path, tmp_path: Path, nothing_starts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest phase and 1.5 GiB, to the tenth of a GiB; the advice is about that phase."""
    many = ["--rollout_batch_size", "400", "--num_episodes", "800", "--train_batch_size", "800"]
    flags = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *AMOUNTS, *many]
    cases = {
        "the update": (["--micro_train_batch_size", "4000", "--micro_rollout_batch_size", "1"], "--micro_train_batch"),
        "scoring": (["--micro_train_batch_size", "1", "--micro_rollout_batch_size", "9000"], "--micro_rollout_batch"),
    }
    for phase, (sizes, advice) in cases.items():
        rows, line = on_gpu([*flags, *sizes, "--gpu_memory", "1.4"], capsys)
        needed = max(value for name, value in rows.items() if name.startswith("total on the device")) / 1024
        assert line.startswith("does NOT fit on a GPU of 1.4 GiB") and f"{needed:.1f} GiB in {phase}" in line
        assert f"{needed + 0.1:.1f} GiB too much" in line and advice in line, line
        _, line = on_gpu([*flags, *sizes, "--gpu_memory", f"{needed + 1.5 + 0.51:.2f}"], capsys)
        assert line.startswith("fits on a GPU of") and "; 0.5 GiB are left" in line
