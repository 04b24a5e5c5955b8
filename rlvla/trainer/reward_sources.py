"""Checks of the reward sources of a run against its algorithm, and the learned reward model as a source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlvla.envs.base import Observation, TaskSpec
from rlvla.envs.registry import ships_with_rlvla
from rlvla.experience import Experience, Sample
from rlvla.models.families import check_checkpoint
from rlvla.models.value_models import REWARD_HEAD_FILE, RewardModel
from rlvla.rewards import RewardConfig, RewardPlan, SuccessConfig, register_reward
from rlvla.rewards.background import NamedNumbers, SampleReward
from rlvla.rewards.base import component_of, scores_of_progress
from rlvla.rewards.config import REWARD_MODEL, ScoringModelConfig
from rlvla.rewards.success_source import SIMULATOR, register_success_source
from rlvla.trainer.algorithm_config import AlgorithmConfig, learner_needs_critic
from rlvla.trainer.config import OptimizationConfig
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.errors import ConfigError, Problem


def learner_gamma(algorithm: AlgorithmConfig) -> float:
    """The discount for reward shaping: `--gamma` if the estimator uses it, 1 if it compares whole episodes."""
    return algorithm.gamma if "gamma" in algorithm.estimator_parameters else 1.0


def reward_problems(
    config: RewardConfig, algorithm: AlgorithmConfig, tasks: Sequence[TaskSpec], success: SuccessConfig | None = None
) -> list[Problem]:
    """Problems of the reward sources: of their settings, and with the tasks or the algorithm."""
    problems: list[Problem] = []
    try:
        plan = RewardPlan.from_config(config, success)
        problems += plan.problems(tasks)
        plan.close()
    except ConfigError as error:
        problems += error.problems
    detector = SIMULATOR if success is None else success.success_source
    sparse = any(ships_with_rlvla(task.suite) and not task.dense_reward for task in tasks)
    native = [name for name in map(component_of, config.reward) if name in ("env", "env_progress")]
    if sparse and detector != SIMULATOR and native:
        text = (
            f"--reward {native[0]} pays where the simulator's success ends an episode, which it does not with "
            f"--success_source {detector}; take success:1.0 instead"
        )
        problems.append(Problem("reward", "no_effect", text))
    gamma = learner_gamma(algorithm)
    if config.gamma_shaping is not None and config.gamma_shaping != gamma:
        discounts = "gamma" in algorithm.estimator_parameters
        source = "--gamma" if discounts else f"{algorithm.advantage_estimator} compares whole episodes"
        text = (
            f"--gamma_shaping {config.gamma_shaping} must equal the learner's discount, {gamma} ({source}); otherwise "
            "shaping changes which policy is best"
        )
        problems.append(Problem("gamma_shaping", "contradiction", text))
    sources = config.source_names
    vlm_potential = "vlm" in sources and config.vlm_progress_term == "potential"
    shapes = vlm_potential or ("rm" in sources and config.rm_mode == "hybrid")
    if shapes and gamma < 1 and algorithm.advantage_level != "action":
        text = (
            f"--advantage_level {algorithm.advantage_level}: shaping discounts per environment step; take action, or "
            "--gamma 1"
        )
        problems.append(Problem("advantage_level", "contradiction", text))
    if vlm_potential and algorithm.one_advantage_per_episode:
        text = (
            f"--vlm_progress_term potential adds up to the same for all episodes of an initial state, and "
            f"--advantage_estimator {algorithm.advantage_estimator} compares their sums: nothing would be learned from "
            "it; take --vlm_progress_term delta"
        )
        problems.append(Problem("vlm_progress_term", "contradiction", text))
    if config.dynamic_truncation and learner_needs_critic(algorithm) and not algorithm.bootstrap_truncated:
        text = (
            "--dynamic_truncation with --no-bootstrap_truncated would count an episode that was cut short as worth "
            "nothing more; leave one of them out"
        )
        problems.append(Problem("dynamic_truncation", "contradiction", text))
    return problems


def waits_on_host(strategy: StrategyConfig, optimization: OptimizationConfig) -> bool:
    """Whether reward models are kept in host memory while they are not scoring episodes."""
    return strategy.zero_stage == 3 or optimization.offload_during_rollout


def configure_for_learner(
    plan: RewardPlan,
    algorithm: AlgorithmConfig,
    device: torch.device | str,
    *,
    waits_on_host: bool = False,
    bf16: bool = False,
) -> None:
    """Configure the sources for the learner: discount, treatment of truncated episodes, device and precision.

    Args:
        plan: the reward sources.
        algorithm: algorithm configuration of the learner.
        device: device of reward models.
        waits_on_host: keep reward models in host memory while they are not scoring, see `waits_on_host`.
        bf16: whether the learner computes in bfloat16.
    """
    needs_critic = learner_needs_critic(algorithm)
    bootstraps = needs_critic and algorithm.bootstrap_truncated
    settings = {
        "gamma": learner_gamma(algorithm),
        "device": device,
        "waits_on_host": waits_on_host,
        "bf16": bf16,
        # The potential of a reward machine is largest at the goal, so without a critic a truncated episode may keep
        # the potential it has reached. A model's estimate near the goal could exceed the reward of success.
        "truncation_ends": needs_critic and not bootstraps,
        "bootstraps": bootstraps,
    }
    for source in [*plan.sources.values(), *([] if plan.success is None else [plan.success.judge])]:
        for name, value in settings.items():
            if hasattr(source, name):
                setattr(source, name, value)


@register_reward("rm_model", scores_decisions=True)
def rm_model(config: RewardConfig) -> RewardModelSource:
    """The source of `--reward rm_model`."""
    if config.rm_model_path is None:
        raise ConfigError.of("rm_model_path", "needs_flag", "--reward rm_model needs --rm_model_path")
    return RewardModelSource(config.rm_model_path, config.rm_model_batch_size, pay=config.rm_model_pay)


@register_reward(REWARD_MODEL, own_flag="reward_pretrain")
def reward_pretrain(config: RewardConfig) -> RewardModelSource:
    """The source that `--reward_pretrain` adds."""
    assert config.reward_pretrain is not None
    return RewardModelSource(config.reward_pretrain, config.rm_model_batch_size, pay="final", flag="reward_pretrain")


class RewardModelSource:
    """Rewards finished episodes by a learned reward model, from their frames.

    Each rank has a complete copy of the model, because ranks call it independently; one without episodes does not.

    Args:
        folder: folder of the model.
        batch_size: frames per forward pass.
        pay: "progress" rewards the change of progress over each decision, at its last executed step; "final" rewards
            the probability of success in the last frame, at the last step.
        flag: the flag that named the folder, for messages.

    Attributes:
        device: where the model runs; set by the trainer.
        waits_on_host: keep the model in host memory while it is not scoring.
        bf16: whether the learner computes in bfloat16. With "final" the model does too; progress is always computed in
            float32, because bfloat16 would round away its changes from frame to frame.

    Raises:
        ConfigError: the folder is not a reward model.
    """

    def __init__(self, folder: str | Path, batch_size: int = 256, *, pay: str, flag: str = "rm_model_path"):
        self._folder, self._batch, self._pay = Path(folder), batch_size, pay
        try:
            self._checkpoint = check_checkpoint(self._folder)
        except ConfigError as error:
            raise ConfigError(problem.of_flag(flag) for problem in error.problems) from None
        if not (self._folder / REWARD_HEAD_FILE).is_file():
            raise ConfigError.of(
                flag,
                "invalid_file",
                f"--{flag}: {self._folder} is not a reward model, {REWARD_HEAD_FILE} is missing there; train one with "
                "cli/train_rm_vla.py",
            )
        self.device: torch.device | str = "cpu"
        self.waits_on_host = False
        self.bf16 = False
        self._model: RewardModel | None = None
        self._place: torch.device | str | None = None  # the device that the model is on; None: it waits on the host
        self._waiting: list[Sample] = []

    def success_probabilities(self, frames: Sequence[tuple[Tensor, Tensor | None, str]]) -> list[float]:
        """P(success) of frames: images [1, N, H, W, 3], proprio [1, P] or None, and instruction of each.

        The model stays on the device until `put_away`.
        """
        model = self._model_on_device()
        return self._predict(model.success_probability, frames).tolist()

    def put_away(self) -> None:
        """Move the model to host memory if it waits there."""
        if self._model is not None and self.waits_on_host and self._place is not None:
            self._model.to("cpu")
            self._place = None

    def submit(self, sample: Sample) -> None:
        """Keep the episode until `collect`."""
        self._waiting.append(sample)

    def collect(self) -> list[SampleReward]:
        """Score the frames of all submitted episodes in batches."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        model = self._model_on_device()
        frames = [(sample.env_images, sample.env_proprio, sample.instruction) for sample in waiting]
        if self._pay == "final":
            last = [(images[-1:], None if state is None else state[-1:], text) for images, state, text in frames]
            paid: list[SampleReward] = [float(p) for p in self._predict(model.success_probability, last)]
        else:
            progress = self._predict(model.progress, frames).split([len(images) for images, _, _ in frames])
            paid = [_progress_rewards(sample, each.numpy()) for sample, each in zip(waiting, progress)]
        self.put_away()
        return paid

    def _model_on_device(self) -> RewardModel:
        if self._model is None:
            self._model = self._checkpoint.load_reward_model().eval()
            if self.bf16 and self._pay == "final":
                self._model.bfloat16()
        if self._place != self.device:
            self._model.to(self.device)
            self._place = self.device
        return self._model

    def _predict(
        self, predict: Callable[[Experience], Tensor], episodes: Sequence[tuple[Tensor, Tensor | None, str]]
    ) -> Tensor:
        """Predictions for the frames of all episodes, concatenated, on the host.

        Args:
            predict: a method of the model that maps a batch of n frames to n numbers.
            episodes: (images [n, N, H, W, 3], proprio [n, P] or None, instruction) of each, from the environment.
        """
        assert self._model is not None
        has_proprio = episodes[0][1] is not None
        state = torch.cat([state for _, state, _ in episodes if state is not None]).numpy() if has_proprio else None
        images, proprio = self._model.prepare(torch.cat([images for images, _, _ in episodes]).numpy(), state)
        instructions = [instruction for images, _, instruction in episodes for _ in range(len(images))]
        answers = []
        for start in range(0, len(images), self._batch):
            rows = slice(start, start + self._batch)
            state_rows = None if proprio is None else torch.from_numpy(proprio[rows])
            frames = torch.from_numpy(images[rows])
            batch = Experience(images=frames, proprio=state_rows, instructions=instructions[rows])
            answers.append(predict(batch.to(self.device)).cpu())
        return torch.cat(answers)


@register_success_source("rm_model")
class RewardModelSuccess:
    """Success detection by a learned reward model, for the frames of all waiting episodes together.

    The model goes to the device with the first frame of a rollout and stays there until the last episode is over.

    Attributes:
        device, waits_on_host, bf16: see `RewardModelSource`.

    Raises:
        ConfigError: no reward model is given.
    """

    def __init__(self, models: ScoringModelConfig):
        if models.rm_model_path is None:
            text = "--success_source rm_model needs --rm_model_path"
            raise ConfigError.of("rm_model_path", "needs_flag", text)
        self._model = RewardModelSource(models.rm_model_path, models.rm_model_batch_size, pay="final")
        self._waiting: list[tuple[Observation, Future[float]]] = []
        self.device: torch.device | str = "cpu"
        self.waits_on_host = False
        self.bf16 = False

    def ask(self, task: TaskSpec, observation: Observation) -> Future[float]:
        """Keep the frame until `answer_waiting`."""
        answer: Future[float] = Future()
        self._waiting.append((observation, answer))
        return answer

    def answer_waiting(self) -> None:
        """Score all frames that wait, in an order that does not depend on when they came."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        model = self._model
        model.device, model.waits_on_host, model.bf16 = self.device, self.waits_on_host, self.bf16
        waiting.sort(key=lambda entry: (entry[0].instruction, entry[0].images.tobytes()))
        frames = [
            (
                torch.from_numpy(o.images[None]),
                None if o.proprio is None else torch.from_numpy(o.proprio[None]),
                o.instruction,
            )
            for o, _ in waiting
        ]
        for (_, answer), probability in zip(waiting, model.success_probabilities(frames)):
            answer.set_result(probability)

    def rollout_over(self) -> None:
        """Free the device, see `RewardModelSource.put_away`."""
        self._model.put_away()

    def probability(self, answer: float) -> float:
        """The model's answer."""
        return answer


def _progress_rewards(sample: Sample, progress: np.ndarray) -> NamedNumbers:
    """Change of progress [S + 1] over each decision, at its last executed step, and the progress itself."""
    executed = sample.executed.sum(1).numpy()
    rewards = np.zeros(int(executed.sum()))
    rewards[executed.cumsum() - 1] = np.diff(progress)
    steps = [0, *executed.cumsum().tolist()]
    clamped = [(step, min(1.0, max(0.0, float(value)))) for step, value in zip(steps, progress)]
    return NamedNumbers(rewards, {}, tuple(scores_of_progress(clamped)))
