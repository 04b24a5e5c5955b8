"""Training of return models, which predict from single frames how an episode will end, and of action values (IQL)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlvla.algorithms.iql import iql_loss, td_targets
from rlvla.algorithms.off_policy.augmentation import random_shifts, shifted
from rlvla.algorithms.recap import ReturnScale, smoothed_histogram
from rlvla.checkpoints.policy_folder import PolicyRecord
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.return_rows import ActionScale, ReturnRows, Transitions, predicted_returns, with_chunks
from rlvla.data.reward_model_rows import split_episodes
from rlvla.evaluation.statistics import spearman
from rlvla.experience import Experience
from rlvla.models.families import check_checkpoint
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.supervised.config import ReturnModelConfig
from rlvla.trainer.supervised.frame_trainer import FrameTrainer
from rlvla.utils.data_files import check_types, read_dataclass, read_json
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import BestEffortWriter, write_json
from rlvla.utils.seeding import derive_seed

RETURNS_FILE = "returns.json"
CALIBRATION_FILE = "calibration.png"
LEAST_EXPLAINED = 0.05  # minimum explained variance of a usable return model on held-out episodes


@dataclass(frozen=True)
class ReturnFacts:
    """Normalization and held-out quality of a return model, recorded in `returns.json`.

    Attributes:
        scales: instruction -> normalization of the returns of that task.
        explained_variance: of the returns of held-out episodes.
        actions: normalization of the actions that implicit Q-learning reads; None: the model has no action values.
    """

    scales: dict[str, ReturnScale]
    explained_variance: float = 0.0
    actions: ActionScale | None = None

    @classmethod
    def read(cls, folder: Path) -> ReturnFacts:
        """The facts in the folder of a return model.

        Raises:
            ConfigError: the folder has no such record, or it cannot be read.
        """
        path = folder / RETURNS_FILE
        if not path.is_file():
            text = f"{folder} is not a return model of cli/train_value_vla.py: {RETURNS_FILE} is missing there"
            raise ConfigError.of(None, "missing_file", text)
        raw = read_json(path)
        check_types(raw, {"scales": dict, "explained_variance": float, "actions": dict | None}, path)
        scales = {name: read_dataclass(ReturnScale, of_task, path) for name, of_task in raw.get("scales", {}).items()}
        actions = raw.get("actions")
        if actions is not None:
            actions = read_dataclass(ActionScale, actions, path)
        return cls(scales, float(raw.get("explained_variance", 0.0)), actions)

    def load_model(self, folder: Path, device: torch.device) -> Any:
        """The model in its folder, for predictions."""
        model = check_checkpoint(folder).load_return_model(action_values=self.actions is not None)
        return model.eval().to(device)


@dataclass(frozen=True)
class ReturnRecord(PolicyRecord):
    """Record of a return model.

    Attributes:
        facts: about its returns.
    """

    facts: ReturnFacts = field(default_factory=lambda: ReturnFacts({}))

    def write(self, folder: Path) -> None:
        """Write the environment, and `returns.json`."""
        super().write(folder)
        write_json(folder / RETURNS_FILE, asdict(self.facts))


class ReturnModelTrainer(FrameTrainer):
    """Trains a return model on episodes with known outcomes; the epoch that explains held-out returns best is kept.

    Args:
        model: the model to train, a `ReturnModel`, or an `ActionValuePredictor` by implicit Q-learning.
        demos: the episodes.
        strategy: process group and DeepSpeed engines.
        config: training hyperparameters.
        save_path: run folder; the result goes to its subfolder `return_model/`.
        record: written into the exported folder, completed with the explained variance.
        chunk_len: A, actions per decision.
        fallback_path: parent of the exported folder if it cannot be written to `save_path`.
    """

    name, selects_by = "return_model", "return_model/explained_variance"
    outcome = selects_by
    model: Any
    _record: ReturnRecord
    _shifts: Tensor  # [2, B, N], of the images of a step
    _calibration: tuple[np.ndarray, np.ndarray]  # predicted and realized returns of held-out rows, last evaluation

    def __init__(
        self,
        model: Any,
        demos: Demonstrations,
        strategy: DeepspeedStrategy,
        config: ReturnModelConfig,
        save_path: Path,
        record: ReturnRecord,
        chunk_len: int,
        fallback_path: str | None = None,
    ):
        self._train, self._heldout = split_episodes(demos, config.heldout_share, strategy.seed)
        self._demos, self._config = demos, config
        facts = record.facts
        self._rows = ReturnRows.of(demos, self._train, model, facts.scales)
        self._transitions: Transitions | None = None
        if facts.actions is not None:
            self._rows.inputs = with_chunks(self._rows.inputs, demos, self._train, facts.actions, chunk_len)
            self._transitions = Transitions.of(demos, self._train, facts.scales, chunk_len)
        items, size = len(self._rows.inputs), config.train_batch_size
        super().__init__(
            model, strategy, config, save_path, record, fallback_path, items=items, drawn=items, batch=size
        )
        if facts.actions is not None:
            model.head.targets.float()  # small steps of the average round to nothing in half precision

    def _loss(self, items: Tensor) -> tuple[Tensor, Experience, dict[str, Tensor]]:
        inputs, world = self._rows.inputs.index(items), self._strategy.world_size
        inputs = inputs.with_fields(images=shifted(inputs.images, self._shifts[:, self._strategy.rank :: world]))
        if self._transitions is None:
            loss, labels = self._cross_entropy(self._logits(inputs), items), {"returns": self._rows.returns[items]}
        else:
            loss, labels = self._iql_loss(items, inputs)
        total = self._strategy.all_reduce({"frames": float(len(items))}, "sum")["frames"]
        return world * loss / total, inputs, labels

    def _cross_entropy(self, logits: Tensor, items: Tensor) -> Tensor:
        """Cross-entropy of the returns, summed over the rows."""
        labels = smoothed_histogram(self._rows.returns[items]).to(self._strategy.device)
        return functional.cross_entropy(logits, labels, reduction="sum")

    def _iql_loss(self, items: Tensor, inputs: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of V and Q, and of the returns that the features are learned from, summed over the rows."""
        transitions, device = self._transitions, self._strategy.device
        assert transitions is not None
        following = self._rows.inputs.index(transitions.following[items]).to(device)
        labels = {"rewards": transitions.rewards[items], "bootstraps": transitions.bootstraps[items]}
        next_values = self.model.expected_returns(following)
        targets = td_targets(labels["rewards"].to(device), next_values, labels["bootstraps"].to(device))
        output: Any = self._logits(inputs)
        of_returns = self._cross_entropy(output.pop("returns"), items)
        loss = iql_loss(**output, targets=targets, expectile=self._config.expectile)
        return loss.sum() + of_returns, labels

    def _train_step(self, step: int, items: Tensor, means: Metrics) -> None:
        images, seed = self._rows.inputs.images, derive_seed(self._strategy.seed, "image shift", step)
        generator = torch.Generator().manual_seed(seed)
        self._shifts = random_shifts(len(items), images.shape[1], self._config.image_shift, generator)
        super()._train_step(step, items, means)
        if self._transitions is not None:
            self.model.head.update_targets(self._config.target_tau)

    def evaluate(self) -> dict[str, float]:
        """Calibration on held-out episodes, and explained variance of as many training episodes."""
        self._engine.train(False)
        sides = {"train": self._train[: len(self._heldout)], "heldout": self._heldout}
        rows = {n: ReturnRows.of(self._demos, side, self.model, self._record.facts.scales) for n, side in sides.items()}
        predicted = {n: predicted_returns(self.model, side.inputs, self._strategy.device) for n, side in rows.items()}
        returns = {n: side.returns.numpy() for n, side in rows.items()}
        explained = {n: explained_variance(predicted[n], returns[n]) for n in sides}
        self._calibration = predicted["heldout"], returns["heldout"]
        return {
            f"{self.name}/explained_variance": explained["heldout"],
            f"{self.name}/train_explained_variance": explained["train"],
            f"{self.name}/mean_error": float(np.abs(predicted["heldout"] - returns["heldout"]).mean()),
            f"{self.name}/spearman": spearman(predicted["heldout"].tolist(), returns["heldout"].tolist()),
            f"{self.name}/heldout_episodes": float(len(self._heldout)),
            f"{self.name}/heldout_successes": float(sum(self._demos.success[i] for i in self._heldout)),
        }

    def _record_best(self) -> ReturnRecord:
        """The record with the explained variance; plots the calibration."""
        if self._strategy.is_main:
            demos, path = self._demos, self._save_path / CALIBRATION_FILE
            lengths = [len(demos.images[i]) for i in self._heldout]
            success = np.repeat([demos.success[i] for i in self._heldout], lengths)
            BestEffortWriter(path.name).attempt(lambda: save_calibration(path, *self._calibration, success))
        facts = replace(self._record.facts, explained_variance=self._best[self.selects_by])
        return replace(self._record, facts=facts)


def explained_variance(predicted: np.ndarray, returns: np.ndarray) -> float:
    """1 - mean squared error / variance of the returns [M]; 0 if they do not vary."""
    variance = float(returns.var())
    return 1.0 - float(np.square(predicted - returns).mean()) / variance if variance else 0.0


def save_calibration(path: Path, predicted: np.ndarray, returns: np.ndarray, success: np.ndarray) -> None:
    """Plot predicted against realized returns [M], colored by the outcome of the episode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for outcome, color, label in ((True, "tab:green", "successful episodes"), (False, "tab:red", "failed episodes")):
        axes.scatter(returns[success == outcome], predicted[success == outcome], 5, color, alpha=0.4, label=label)
    axes.axline((-1, -1), (0, 0), color="gray", linewidth=0.8)
    axes.set(xlabel="realized return", ylabel="predicted return", xlim=(-1.02, 0.02), ylim=(-1.02, 0.02))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
