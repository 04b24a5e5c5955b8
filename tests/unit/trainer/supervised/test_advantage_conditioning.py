"""RECAP: labels of the rows, training on the condition, and acting with guidance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli import collect_demos, eval_vla, recap_vla, train_ppo_vla, train_sft_vla, train_value_vla
from rlvla.algorithms.recap import ReturnScale
from rlvla.data.reading import read_several
from rlvla.data.rows import DemonstrationRows
from rlvla.models.families import check_checkpoint
from rlvla.models.guidance import conditioned, without_condition
from rlvla.models.network_policy import NetworkPolicy
from rlvla.trainer.supervised.advantages import advantage_labels, rows_by_advantage
from rlvla.utils.errors import ConfigError

SMALL = ["--pretrain", "compact", "--compact_channels", "8", "--compact_width", "32", "--no-use_tensorboard"]
SFT = [*SMALL, "--action_chunk_len", "3", "--train_batch_size", "32", "--max_steps", "6"]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Demonstrations; a policy's own episodes, some of them failures; a return model, which is not asked for much."""
    folder = tmp_path_factory.mktemp("recap")
    words = ["--task_suite_name", "toy_reach", "--task_ids", "0", "--image_size", "16", "--use_proprio"]
    words += ["--num_envs", "1", "--output"]
    collect_demos.main([*words, str(folder / "demos"), "--num_demos", "6"])
    mixed = ["--num_demos", "16", "--keep", "all", "--offset_prob", "0.6", "--offset_max", "0.6"]
    collect_demos.main([*words, str(folder / "own"), *mixed])
    with h5py.File(folder / "own" / "demos.hdf5", "r+") as file:  # as `--policy` records them
        record = json.loads(file["data"].attrs["env_args"])
        assert record["player"] == "expert"
        file["data"].attrs["env_args"] = json.dumps(record | {"player": "policy"})
    paths = {name: str(folder / name) for name in ("demos", "own", "value")}
    words = ["--demos", paths["demos"], paths["own"], *SMALL, "--max_epochs", "1"]
    train_value_vla.main([*words, "--save_path", paths["value"]])
    written = folder / "value" / "return_model" / "returns.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"explained_variance": 0.5}))
    return paths


def train(data: dict[str, str], folder: Path, *flags: str, condition: bool = True) -> Path:
    words = ["--demos", data["demos"], data["own"], *SFT, "--save_path", str(folder)]
    train_sft_vla.main([*words, *(["--advantage_conditioning", data["value"]] if condition else []), *flags])
    return folder / "policy"


class ReadsProprio(torch.nn.Module):
    """A return model that reads the value from the first proprio."""

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        return images, proprio

    def expected_returns(self, batch: Any) -> torch.Tensor:
        return batch.proprio[:, 0]


def test_labels(data: dict[str, str]) -> None:
    """Demonstrations always; own rows by advantage, 40 % of them; corrections always, even if the rest is labelled."""
    demos = read_several([data["demos"], data["own"]])
    counts = [len(images) for images in demos.images]
    own = rows_by_advantage(demos, demonstrations=False)
    assert not own[: sum(counts[:6])].any() and own[sum(counts[:6]) :].all()
    scale = ReturnScale(max(counts), 1.0)
    scales = dict.fromkeys(demos.instructions, scale)
    arguments = {"horizon": 4, "share": 0.4, "demonstrations": False}
    labels = advantage_labels(ReadsProprio(), scales, demos, torch.device("cpu"), **arguments)
    assert labels.positive[~own].all()
    advantages = np.concatenate(
        [
            scale.advantages(state[:, 0], np.arange(len(state)), len(state), success, 4)
            for state, success in zip(demos.proprio, demos.success)
        ]
    )
    tasks = np.repeat(demos.instructions, counts)
    for task in set(demos.instructions):
        rows = own & (tasks == task)
        least = sorted(advantages[rows].tolist())[-round(0.4 * int(rows.sum()))]
        assert labels.positive[rows].tolist() == [advantage >= least for advantage in advantages[rows]]
    flags = [np.ones(len(actions), bool) for actions in demos.actions]
    flags[0][0] = False  # the policy acted first
    demos.interventions = flags
    every = rows_by_advantage(demos, demonstrations=True)
    assert every[0] and not every[1 : counts[0]].any() and every[counts[0] :].all()


def test_rows_carry_the_condition_unless_it_is_dropped(data: dict[str, str]) -> None:
    demos = read_several([data["demos"]])
    policy = check_checkpoint(Path(data["value"]) / "start").load_policy()
    rows = DemonstrationRows(demos, policy)
    positive = np.arange(len(rows)) % 2 == 0
    plain = [batch.instructions for batch in rows.batches(16, 4, 0)]
    rows.condition_on(positive, 0.25)
    batches = list(rows.batches(16, 4, 0))
    order = np.concatenate([list(texts) for texts in plain])
    flags = [without_condition(text) for batch in batches for text in batch.instructions]
    assert [text for text, _ in flags] == order.tolist(), "the same rows in the same order"
    share = np.mean([flag for _, flag in flags])
    assert 0.3 < share < 0.45  # half of them, of which a quarter are dropped
    two = [list(rows.batches(16, 4, 0, rank, 2)) for rank in range(2)]
    for whole, first, second in zip(batches, *two):
        assert whole.instructions[0::2] == first.instructions and whole.instructions[1::2] == second.instructions
    taken = rows.take(np.arange(4)).instructions
    assert [without_condition(text)[1] for text in taken] == [True, False, True, False], "never dropped when measured"


@pytest.mark.parametrize("head", ["tokens", "flow"])
def test_a_condition_that_is_always_dropped_is_plain_training(data: dict[str, str], tmp_path: Path, head: str) -> None:
    # Without clipping: the last bit of the norm depends on the number of parameters, on some processors.
    flags = ["--compact_head", head, "--max_norm", "1e9"]
    plain = load_file(train(data, tmp_path / "plain", *flags, condition=False) / WEIGHTS)
    dropped = load_file(train(data, tmp_path / "dropped", *flags, "--condition_dropout", "1") / WEIGHTS)
    assert not dropped.pop("network.condition").any()
    assert plain.keys() == dropped.keys()
    assert all(torch.equal(plain[name], dropped[name]) for name in plain)


def test_validation_does_not_repeat_the_condition(
    data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows carry it, and `act` adds it by itself."""
    seen: list[str] = []
    plain = NetworkPolicy._decision_inputs

    def decision_inputs(policy: Any, images: Any, proprio: Any, instructions: Any) -> Any:
        seen.extend(instructions)
        return plain(policy, images, proprio, instructions)

    monkeypatch.setattr(NetworkPolicy, "_decision_inputs", decision_inputs)
    train(data, tmp_path / "run", "--heldout_share", "0.3", "--compact_head", "gaussian")
    assert seen and not any(without_condition(text)[1] for text in seen)


@pytest.fixture(scope="module", params=["gaussian", "tokens", "flow"])
def policy_folder(request: pytest.FixtureRequest, data: dict[str, str], tmp_path_factory: Any) -> Path:
    """A conditioned policy, whose condition is made strong."""
    folder = train(data, tmp_path_factory.mktemp(request.param) / "run", "--compact_head", request.param)
    weights = load_file(folder / WEIGHTS)
    assert weights["network.condition"].any(), "the condition is trained"
    generator = torch.Generator().manual_seed(0)
    weights["network.condition"] = torch.randn(weights["network.condition"].shape, generator=generator)
    save_file(weights, folder / WEIGHTS)
    return folder


def acting(folder: Path, weight: float | None, instruction: str) -> tuple[np.ndarray, np.ndarray]:
    """Sampled actions and log-probs of three observations."""
    policy: Any = check_checkpoint(folder, overrides={} if weight is None else {"guidance": weight}).load_policy()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (3, 1, 16, 16, 3), dtype=np.uint8)
    proprio = rng.standard_normal((3, policy.spec.proprio_dim)).astype(np.float32)
    noise = np.stack([policy.spec.draw(rng) for _ in range(3)])
    decision = policy.eval().act(images, proprio, [instruction] * 3, noise=noise, temperature=0.7)
    return decision.actions, decision.log_probs


def test_guidance(policy_folder: Path, tmp_path: Path) -> None:
    """Weights 0 and 1 are the two policies to the bit; 0.5 is between them, 2 is beyond."""
    unguided = Path(shutil.copytree(policy_folder, tmp_path / "unguided"))
    (unguided / "rlvla_environment.json").unlink()
    without, positive = (acting(unguided, None, text) for text in ("reach", conditioned("reach")))
    assert not np.array_equal(without[0], positive[0])
    for weight, wanted in ((0.0, without), (1.0, positive), (None, positive)):
        assert all(np.array_equal(a, b) for a, b in zip(acting(policy_folder, weight, "reach"), wanted))
    half, beyond = acting(policy_folder, 0.5, "reach"), acting(policy_folder, 2.0, "reach")
    nearly = acting(policy_folder, 1 - 1e-7, "reach")
    assert np.abs(nearly[1] - positive[1]).max() < 1e-3, "continuous at 1"
    assert not np.array_equal(half[0], positive[0]) and not np.array_equal(beyond[0], positive[0])


def test_rounds_start_from_an_unconditioned_policy(
    policy_folder: Path, data: dict[str, str], tmp_path: Path, refused: Callable[[Callable], list[str]]
) -> None:
    flags = ["--pretrain", str(policy_folder), "--demos", data["demos"], "--save_path", str(tmp_path / "rounds")]
    assert refused(lambda: recap_vla.main(flags)) == ["conditioned"]
    assert not (tmp_path / "rounds").exists()


def test_guided_parameters(policy_folder: Path) -> None:
    """Logits, means and velocities against the two policies' own."""
    policy: Any = check_checkpoint(policy_folder).load_policy().eval()
    images, state = torch.zeros(2, 1, 16, 16, 3, dtype=torch.uint8), torch.zeros(2, policy.spec.proprio_dim)
    pair = [
        policy.hidden({}, **policy.observations(images, state, [text] * 2)) for text in ("reach", conditioned("reach"))
    ]
    x, t = torch.randn(2, 1, 3, policy.spec.action_dim), torch.full((2, 1), 0.3)

    def values(distribution: Any) -> torch.Tensor:
        if hasattr(distribution, "velocity"):
            return distribution.velocity(x, t)
        return distribution.mean if hasattr(distribution, "mean") else distribution.all_log_probs

    none, positive = (values(policy._head.distribution(policy, hidden, 1.0)) for hidden in pair)
    found = values(policy._head.guided(policy, *pair, 2.5, 1.0))
    wanted = -1.5 * none + 2.5 * positive
    if policy.spec.noise == "uniform":
        wanted = wanted - wanted.logsumexp(-1, keepdim=True)
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.nightly
def test_a_conditioned_policy_is_evaluated_plays_and_is_not_reinforced(
    data: dict[str, str], tmp_path: Path, refused: Callable[[Callable], list[str]]
) -> None:
    folder = train(data, tmp_path / "run", "--guidance", "1.5")
    assert check_checkpoint(folder).guidance == 1.5
    common = ["--eval_episodes", "2", "--num_envs", "1", "--max_steps", "4"]
    eval_vla.main(["--pretrain", str(folder), *common, "--guidance", "0"])
    own = ["--policy", str(folder), "--num_demos", "2", "--keep", "all", "--num_envs", "1", "--max_steps", "4"]
    collect_demos.main([*own, "--output", str(tmp_path / "own")])
    assert read_several([str(tmp_path / "own")]).autonomous == [True, True]
    again = [
        "--demos",
        data["demos"],
        data["own"],
        "--no-use_tensorboard",
        "--pretrain",
        str(folder),
        "--max_steps",
        "2",
    ]
    again += ["--advantage_conditioning", data["value"]]
    train_sft_vla.main([*again, "--save_path", str(tmp_path / "again")])
    assert check_checkpoint(tmp_path / "again" / "policy").guidance == 1.0
    ppo = ["--pretrain", str(folder), "--save_path", str(tmp_path / "ppo")]
    assert "conditioned" in refused(lambda: train_ppo_vla.main(ppo))
    plain = ["--demos", data["demos"], "--pretrain", str(folder), "--save_path", str(tmp_path / "plain")]
    assert refused(lambda: train_sft_vla.main(plain)) == ["conditioned"]


def test_what_cannot_be_conditioned_is_refused(
    data: dict[str, str], tmp_path: Path, refused: Callable[[Callable], list[str]]
) -> None:
    value = Path(shutil.copytree(data["value"], tmp_path / "value"))
    written = value / "return_model" / "returns.json"
    record = json.loads(written.read_text())

    def reasons(demos: list[str]) -> list[str]:
        words = ["--demos", *demos, *SFT, "--advantage_conditioning", str(value), "--save_path", str(tmp_path / "run")]
        return refused(lambda: train_sft_vla.main(words))

    written.write_text(json.dumps(record | {"explained_variance": 0.01}))
    assert reasons([data["own"]]) == ["explains_nothing"]
    written.write_text(json.dumps(record | {"scales": {}}))
    assert reasons([data["own"]]) == ["other_tasks"]
    written.write_text(json.dumps(record))
    assert reasons([data["demos"]]) == ["no_own_episodes"]
    assert not (tmp_path / "run").exists()
    plain = train(data, tmp_path / "plain", condition=False)
    with pytest.raises(ConfigError, match="was not trained with --advantage_conditioning"):
        check_checkpoint(plain, overrides={"guidance": 1.0})
