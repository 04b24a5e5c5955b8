"""Soft actor-critic on replayed decisions: plain chunks or action primitives, with or without demonstrations."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlvla.algorithms.off_policy import (
    actor_loss,
    conservative_loss,
    critic_loss,
    imitation_loss,
    over_primitives,
    parameter_target_entropy,
    primitive_target_entropy,
    random_critics,
    random_shift,
    reduce_critics,
    soft_target,
    soft_value,
    update_target,
)
from rlvla.data.demonstrations import Demonstrations
from rlvla.envs.base import TaskSpec
from rlvla.experience import Sample
from rlvla.models.distributions import sample_by_inverse_cdf
from rlvla.models.sac_policy import MatchingBatch, SACCritic, SACPolicy, SampledDecisions
from rlvla.replay.buffer import Drawn
from rlvla.replay.sampling import linear_schedule
from rlvla.trainer.algorithm import Algorithm, LearnerSetup, Plan, register_algorithm, update_sampler
from rlvla.trainer.measurements import Stopwatch
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_writer import OFF_POLICY_OVERVIEW, Layout, off_policy_layout
from rlvla.trainer.models import LoopModels
from rlvla.trainer.off_policy.config import SAC_NAME, OffPolicyConfig
from rlvla.trainer.off_policy.hindsight import Hindsight
from rlvla.trainer.off_policy.memory import Batch, Memory, Observations, draw_share, make_batch, normalize_weights
from rlvla.trainer.off_policy.rescoring import Rescoring
from rlvla.utils.bars import progress_bar
from rlvla.utils.deepspeed.engine import Engine, OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, TrainingHalted
from rlvla.utils.seeding import derive_rng, derive_seed
from rlvla.utils.terminal import log

PARAMETERS, CHOICE = "parameters", "choice"
_BETAS, _EPS = (0.9, 0.999), 1e-8  # Adam


@dataclass
class SACModels(LoopModels):
    """The networks of `SAC`, both also `nn.Module`s."""

    actor: SACPolicy
    critic: SACCritic


@dataclass
class SACSetup(LearnerSetup):
    """Constructor arguments of `SAC`; attributes as in `LearnerSetup`."""

    models: SACModels
    strategy: DeepspeedStrategy
    config: OffPolicyConfig
    tasks: Sequence[TaskSpec]
    demos: Demonstrations | None = None


@register_algorithm(SAC_NAME)
class SAC(Algorithm):
    """Soft actor-critic (Haarnoja et al. 2018) with an ensemble of critics, n-step targets and prioritised replay.

    With action primitives the policy is pi(k | s) pi(x | s, k) (MAPLE, Nasiriany et al. 2022).

    Attributes:
        updates: updates of the critics so far.
        pending_updates: updates that the decisions played so far allow.
        memory: the replay buffer of this rank.
    """

    overview = OFF_POLICY_OVERVIEW

    def __init__(self, setup: LearnerSetup):
        super().__init__(setup)
        if not isinstance(setup, SACSetup):
            raise ConfigError.of("algorithm", "mismatch", "--algorithm sac is trained by cli/train_sac_vla.py")
        config, strategy = setup.config, setup.strategy
        sac, replay, rank, seed = config.sac, config.replay, strategy.rank, strategy.seed
        self.config, self._sac, self._strategy = config, sac, strategy
        assert sac.n_critics is not None and sac.actor_reduction is not None and sac.target_entropy is not None
        self._n_critics, self._actor_reduction, self._target_entropy = (
            sac.n_critics,
            sac.actor_reduction,
            sac.target_entropy,
        )
        self._policy = setup.models.actor
        self.actor = self._engine(setup.models.actor, sac.actor_learning_rate)
        target = copy.deepcopy(setup.models.critic)
        assert isinstance(target, nn.Module)
        self._target = target.requires_grad_(False).to(strategy.device)
        self.critic = self._engine(setup.models.critic, sac.critic_learning_rate)
        names = (PARAMETERS, CHOICE) if self._policy.has_primitives else (PARAMETERS,)
        self.temperatures = Temperatures(dict.fromkeys(names, sac.init_temperature), sac.temperature_learning_rate)
        self.memory = Memory(self._policy, replay, self._folder(rank, strategy.world_size))
        self._demos = None if setup.demos is None else self._demonstrated(setup.demos)
        self._hindsight: Hindsight | None = None
        if replay.her_ratio:
            assert config.machines is not None  # checked with the flags
            self._hindsight = Hindsight(replay, config.machines, setup.tasks, config.success_reward)
        self._rescoring: Rescoring | None = None
        if replay.replay_rescore_interval:
            assert config.judge is not None  # checked with the flags
            every, budget = replay.replay_rescore_interval, replay.replay_rescore_budget
            self._rescoring = Rescoring(config.judge, setup.tasks, every, budget)
        self._sampler = setup.sampler()
        self._rng, self._shared_rng = derive_rng(seed, "replay", rank), derive_rng(seed, "replay of all ranks")
        self._noise = torch.Generator().manual_seed(derive_seed(seed, "noise of updates", rank))
        self._shared_noise = torch.Generator().manual_seed(derive_seed(seed, "critics of targets"))
        # Decisions until the end of any episode, for recorded returns.
        self._horizon = max(task.max_steps for task in setup.tasks) if sac.cql_coef else 0
        self.updates, self._episodes, self.pending_updates = 0, 0, 0.0
        self._played = self._normalized = False
        self._fresh: Sequence[Sample] = ()  # episodes of the iteration, not in the replay buffer yet
        self._bad_steps = {"actor": 0, "critic": 0}

    def _engine(self, model: SACPolicy | SACCritic, learning_rate: float) -> Engine:
        assert isinstance(model, nn.Module)
        optimizer = OptimConfig(learning_rate, _BETAS, 0.0, "constant", warmup_ratio=0.0, total_steps=1)
        return self._strategy.prepare(model, optimizer, small=True)

    def layout(self, rewards: Iterable[str]) -> Layout:
        """Charts of values, temperatures and the replay buffer instead of PPO's."""
        return off_policy_layout(rewards)

    def _folder(self, rank: int, world_size: int) -> Path:
        return self.config.replay_folder / f"rank_{rank}_of_{world_size}"

    @property
    def engines(self) -> dict[str, Engine]:
        """Actor and critics."""
        return {"actor": self.actor, "critic": self.critic}

    # ------------------------------------------------------------------------------------------------ playing
    def plan(self, iteration: int) -> Plan | None:
        """The episodes of this rank; the first ones of a run have random actions."""
        self._policy.random_actions = self._policy.random_primitives = False
        if self._played:
            self._played = False
            return None
        self._played = True
        self._policy.random_actions = self._episodes < self.config.batch.exploring_episodes
        self._policy.random_primitives = self._episodes < self._sac.choice_exploration
        total = self.config.batch.rollout_batch_size
        share = total // self._strategy.world_size
        first = iteration * total + share * self._strategy.rank
        return Plan(self._sampler.at(range(first, first + share)))

    def interrupt(self) -> None:
        """Discard the plan and the episodes that are not in the replay buffer yet."""
        self._fresh = ()
        self._played = self._policy.random_actions = self._policy.random_primitives = False

    def ingest(self, samples: Sequence[Sample]) -> None:
        """Receive the episodes of the iteration, which `update` puts into the replay buffer.

        Raises:
            TrainingHalted: on all ranks: a reward of one of them is NaN or infinite.
        """
        nonfinite = [
            f"{s.suite}, initial state {s.init_state_id}" for s in samples if not torch.isfinite(s.rewards).all()
        ]
        nonfinite = [episode for of_rank in self._strategy.gather_objects(nonfinite) for episode in of_rank]
        if nonfinite:
            raise TrainingHalted(
                f"rewards hold NaN or infinity ({nonfinite[0]}), which would spoil all values; look at the reward "
                "sources (--reward)"
            )
        self._fresh = samples

    def _append(self, samples: Sequence[Sample]) -> None:
        """Put episodes into the replay buffer; TrainingHalted on all ranks if they cannot be written."""
        if self._rescoring is not None:
            self._rescoring.collect_scores(self.memory, self.updates)
        scale, relabel = self._sac.reward_scale, None
        if self._hindsight is not None:
            relabel = partial(self._hindsight.copies, weights=self.config.reward_weights(), scale=scale, rng=self._rng)
        problem = None
        try:
            self.memory.append(samples, scale=scale, version=self.updates, now=self.updates, relabel=relabel)
        except OSError as error:
            problem = str(error)
        problems = [text for text in self._strategy.gather_objects(problem) if text is not None]
        if problems:
            raise TrainingHalted(f"the replay buffer cannot take the episodes: {problems[0]}")
        update_sampler(self._sampler, samples, self._strategy)
        counts = {"episodes": float(len(samples)), "decisions": float(sum(s.num_decisions for s in samples))}
        counts = self._strategy.all_reduce(counts, "sum")
        self._episodes += int(counts["episodes"])
        assert self.config.batch.utd_ratio is not None
        self.pending_updates += counts["decisions"] * self.config.batch.utd_ratio

    # ------------------------------------------------------------------------------------------------ updating
    def pretrain(self) -> Iterator[None]:
        """Offline updates on the demonstrations (--offline_updates)."""
        count = self.config.batch.offline_updates
        if not count or self._demos is None:
            return
        self._normalize(self._demos)
        metrics, size = Metrics(), self.config.batch.train_batch_size // self._strategy.world_size
        self.actor.train(True)
        self.critic.train(True)
        with progress_bar(count, "offline updates", enabled=self._strategy.is_main) as bar:
            for number in range(1, count + 1):
                self._step(self._batch([self._draw_demonstrations(self._demos, size)]), number, metrics)
                bar.update()
                yield
        self.actor.train(False)
        values = metrics.reduce(self._strategy)
        if self._strategy.is_main:
            names = {"TD error": "critic/td_error", "value": "critic/q_mean", "entropy": "actor/entropy"}
            shown = [f"{label} {values[name]:.3g}" for label, name in names.items() if name in values]
            log.info(f"{count} offline updates on the demonstrations, means: {', '.join(shown)}")

    def update(self, metrics: Metrics) -> dict[str, float]:
        """Put the episodes of the iteration into the replay buffer, and run the pending updates."""
        self._append(self._fresh)
        self._fresh = ()
        rows = self._strategy.all_reduce({"rows": float(len(self.memory.buffer))}, "min")["rows"]
        if self._episodes < self.config.batch.exploring_episodes or not rows:
            return self._replay_metrics(metrics)
        self._normalize(self.memory)
        watch = Stopwatch("timing_s/replay", "timing_s/update")
        self.actor.train(True)
        self.critic.train(True)
        for _ in range(int(self.pending_updates)):
            self.pending_updates -= 1.0
            with watch.phase("timing_s/replay"):
                drawn, batch = self._draw()
            with watch.phase("timing_s/update"):
                self.updates += 1
                errors = self._step(batch, self.updates, metrics)
            with watch.phase("timing_s/replay"):
                if self.config.replay.replay_priority != "uniform":
                    self._prioritise(drawn.rows, drawn.episodes, errors[: len(drawn.rows)])
        with watch.phase("timing_s/replay"):
            self._refresh(metrics)
            self._rescore(metrics)
        self.actor.train(False)
        metrics.maximum(watch.seconds)
        values = {f"actor/temperature_{name}": value for name, value in self.temperatures.values().items()}
        return values | self._replay_metrics(metrics)

    def _step(self, batch: Batch, number: int, metrics: Metrics) -> np.ndarray:
        """Update `number` (from 1) of critics, actor, temperatures and target; returns absolute TD errors [B]."""
        errors = self._update_critics(batch, metrics)
        if number % self.config.batch.actor_interval == 0:
            self._update_actor(batch, metrics)
        update_target(self._target, self.critic.module, self._sac.tau)
        return errors

    def _draw(self) -> tuple[Drawn, Batch]:
        replay, played = self.config.replay, (self._episodes, self.config.batch.num_episodes)
        beta = linear_schedule(*played, start=replay.replay_beta[0], end=replay.replay_beta[1])
        share = linear_schedule(*played, start=replay.replay_share[0], end=replay.replay_share[1])
        if replay.replay_priority == "uniform":
            share = 0.0
        size = self.config.batch.train_batch_size
        demonstrated = 0 if self._demos is None else round(size * replay.demo_share / self._strategy.world_size)
        drawn = draw_share(
            self.memory.buffer,
            size - demonstrated * self._strategy.world_size,
            self._rng,
            self._shared_rng,
            self._strategy,
            replay,
            beta=beta,
            share=share,
        )
        rows = [self.memory.rows(drawn, self._sac.n_step, self._sac.gamma, self._horizon)]
        if self._demos is not None:
            # Demonstrations have weight 1; so have played decisions on average, however they were drawn.
            normalize_weights(rows[0], self._strategy)
            rows.append(self._draw_demonstrations(self._demos, demonstrated))
        return drawn, self._batch(rows)

    def _draw_demonstrations(self, demos: Memory, count: int) -> dict[str, np.ndarray]:
        """Rows of demonstrations, drawn uniformly."""
        drawn = demos.buffer.sample(count, self._rng, share=0.0)
        return demos.rows(drawn, self._sac.n_step, self._sac.gamma, self._horizon)

    def _batch(self, rows: Sequence[dict[str, np.ndarray]]) -> Batch:
        """A batch of rows, with its images shifted (--image_shift)."""
        batch = make_batch(rows, self._policy, self._strategy.device)
        if self._sac.image_shift:
            for observations in (batch.now, batch.later):
                assert observations.images is not None  # checked with the flags
                observations.images = random_shift(observations.images, self._sac.image_shift, self._noise)
        return batch

    def _demonstrated(self, demos: Demonstrations) -> Memory:
        """A buffer with this rank's share of the demonstrations; it is not part of checkpoints."""
        rank, weights = self._strategy.rank, self.config.reward_weights()
        share = demos.demonstrated_episodes[rank :: self._strategy.world_size]
        success = weights.get("success", 0.0) * self.config.success_reward + weights.get("env", 0.0)
        folder = self.config.replay_folder / f"demos_rank_{rank}"
        return Memory.of_demonstrations(self._policy, demos, share, self._sac.reward_scale * success, folder)

    def _refresh(self, metrics: Metrics) -> None:
        """Recompute old TD errors (--replay_refresh_interval)."""
        replay, buffer = self.config.replay, self.memory.buffer
        if replay.replay_priority == "uniform":
            return
        age = buffer.score_age(self.updates, of="prioritised_at")
        metrics.mean({"replay/td_age_mean": age}, float(not math.isnan(age)))
        if not replay.replay_refresh_interval:
            return
        due = buffer.due(
            self.updates, replay.replay_refresh_interval, replay.replay_refresh_budget, of="prioritised_at"
        )
        for first in range(0, len(due), self.config.batch.train_batch_size):
            rows = due[first : first + self.config.batch.train_batch_size]
            ones, episodes = np.ones(len(rows)), buffer.gather(rows, ["episode"])["episode"]
            stored = self.memory.rows(Drawn(rows, episodes, ones, ones), self._sac.n_step, self._sac.gamma)
            batch = make_batch([stored], self._policy, self._strategy.device)
            with torch.no_grad():
                targets, now = self._targets(batch, self._noise), batch.now
                q_values = self.critic.module(batch.actions, now.proprio, now.images, now.sentences)
                _, errors = critic_loss(q_values, targets)
            self._prioritise(rows, episodes, errors.cpu().numpy())
        metrics.total({"replay/refreshed": float(len(due))})

    def _rescore(self, metrics: Metrics) -> None:
        """Request new scores (--replay_rescore_interval); they arrive while the next episodes are played."""
        if self.config.replay.replay_score_source is None:
            return
        age = self.memory.buffer.score_age(self.updates)
        metrics.mean({"replay/score_age_mean": age}, float(not math.isnan(age)))
        if self._rescoring is None or self._episodes >= self.config.batch.num_episodes:
            return
        metrics.total({"replay/rescored": float(self._rescoring.ask(self.memory, self.updates))})

    def _prioritise(self, rows: np.ndarray, episodes: np.ndarray, errors: np.ndarray) -> None:
        """Set priorities by TD errors; nonfinite ones are ignored, as their step was skipped."""
        finite = np.isfinite(errors)
        if finite.any():
            self.memory.buffer.update(rows[finite], episodes[finite], now=self.updates, td_error=errors[finite])

    @torch.no_grad()
    def _normalize(self, memory: Memory) -> None:
        """Set the normalization of proprio to the statistics of all episodes of a memory, once."""
        if self._normalized:
            return
        self._normalized = True
        if not len(self._target.proprio_normalization()[0]):
            return
        counts, totals, squares = zip(*self._strategy.gather_objects(memory.proprio_sums()))
        mean = torch.from_numpy(sum(totals) / sum(counts))
        std = (torch.from_numpy(sum(squares) / sum(counts)) - mean.square()).clamp_min(0.0).sqrt()
        self._set_normalization(mean.float(), std.float())

    def _set_normalization(self, mean: Tensor, std: Tensor) -> None:
        for network in (self._policy, self.critic.module, self._target):
            network.set_proprio_normalization(mean, std)

    def _sample(
        self, observations: Observations, actor: SACPolicy | Engine, matching: MatchingBatch | None = None
    ) -> SampledDecisions:
        """Decisions of the policy; the noise comes from this rank's generator."""
        proprio, images, policy = observations.proprio, observations.images, self._policy
        rows = next(len(observed) for observed in (proprio, images) if observed is not None)
        noise = torch.randn(rows, len(policy.parameter_mask), policy.noise_width, generator=self._noise)
        proprio = None if proprio is None else policy.policy_proprio(proprio)
        return actor(proprio, images, observations.sentences, noise.to(self._strategy.device), matching)

    def _update_critics(self, batch: Batch, metrics: Metrics) -> np.ndarray:
        """One step of the critics; returns the absolute TD errors [B]."""
        rows, targets, now = self.config.batch.train_batch_size, self._targets(batch, self._shared_noise), batch.now
        over_rows: dict[str, Any] = {"mask": batch.mask, "num_rows": float(rows), "dp_size": self._strategy.world_size}
        penalty: Tensor | float = 0.0
        if self._sac.cql_coef:
            sampled, log_densities, floors = self._sampled_decisions(batch)
            actions = torch.cat([batch.actions[:, None], sampled], 1)
            values = self.critic(actions, now.proprio, now.images, now.sentences)
            q_values = values[..., 0]
            penalty = conservative_loss(q_values, values[..., 1:], log_densities, floors=floors, **over_rows)
            metrics.mean({"critic/conservative_loss": penalty.detach()}, 1.0)
        else:
            q_values = self.critic(batch.actions, now.proprio, now.images, now.sentences)
        loss, errors = critic_loss(q_values, targets, weights=batch.weights, **over_rows)
        loss = loss + self._sac.cql_coef * penalty
        norm = self.critic.backward(loss, last=True)
        self._check_step("critic", norm)
        kept = batch.mask
        means = {"critic/q_mean": q_values.detach()[:, kept].mean(), "critic/target_mean": targets[kept].mean()}
        means |= {"critic/td_error": errors[kept].mean(), "replay/is_weight_mean": batch.weights[kept].mean()}
        metrics.mean(means, float(batch.mask.sum()))
        metrics.mean({"critic/loss": loss.detach(), "critic/grad_norm": norm or 0.0}, 1.0)
        return errors.cpu().numpy()

    @torch.no_grad()
    def _sampled_decisions(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Decisions of the conservative penalty: `cql_actions` uniform ones, then as many of the policy.

        Returns:
            Decisions [B, N, E], their log-densities and the floors of their values [B, N]: recorded returns for those
            of the policy.
        """
        count, width = self._sac.cql_actions, self._policy.parameter_mask.shape[-1]
        assert batch.recorded_returns is not None
        rows = len(batch.actions)
        uniform = 2.0 * torch.rand(rows, count, width, generator=self._noise).to(batch.actions.device) - 1.0
        drawn = [self._sample(batch.now, self._policy) for _ in range(count)]
        densities = torch.cat([decisions.log_densities.sum(-1) for decisions in drawn], 1)
        decisions = torch.cat([uniform, *(decisions.parameters for decisions in drawn)], 1)
        log_densities = torch.cat([torch.full_like(densities, -width * math.log(2.0)), densities], 1)
        floors = batch.recorded_returns[:, None].expand_as(densities)
        floors = torch.cat([torch.full_like(densities, -math.inf), floors], 1)
        return self._policy.critic_actions(decisions, None), log_densities, floors

    def _targets(self, batch: Batch, subsets: torch.Generator) -> Tensor:
        """TD targets [B] of the critics: minimum over a subset of the target critics, drawn by `subsets`."""
        sac = self._sac
        with torch.no_grad():
            values, densities, choice, _ = self._sample(batch.later, self._policy)
            log_probs = densities.sum(-1)
            chosen = torch.zeros(len(values), dtype=torch.long, device=values.device)
            if choice is not None:
                uniform = torch.rand(len(values), 1, generator=self._noise).to(values.device)
                chosen = sample_by_inverse_cdf(choice[:, None], uniform)[:, 0]
            row = torch.arange(len(values), device=values.device)
            action = self._policy.critic_actions(values[row, chosen], None if choice is None else chosen)
            some = sac.target_critics < self._n_critics
            critics = random_critics(self._n_critics, sac.target_critics, subsets) if some else None
            q_next = self._target(action, batch.later.proprio, batch.later.images, batch.later.sentences, critics)
            if sac.entropy_in_target:
                of_choice = None if choice is None else choice[row, chosen]
                next_values = soft_value(
                    q_next,
                    log_probs[row, chosen],
                    of_choice,
                    alpha=self.temperatures[PARAMETERS],
                    alpha_primitives=self.temperatures[CHOICE] if choice is not None else 0.0,
                )
            else:
                next_values = reduce_critics(q_next)
            return soft_target(batch.returns, batch.discounts, next_values)

    def _update_actor(self, batch: Batch, metrics: Metrics) -> None:
        """One step of the actor and of the temperatures."""
        now, critic = batch.now, self.critic.module
        values, densities, choice, matching_losses = self._sample(now, self.actor, self._matching_batch(batch))
        log_probs = densities.sum(-1)
        if choice is None:
            decisions, primitives = values[:, 0], None
        else:
            decisions = values
            primitives = torch.arange(values.shape[1], device=values.device).expand(len(values), -1)
        with _frozen(critic):
            actions = self._policy.critic_actions(decisions, primitives)
            q_values = critic(actions, now.proprio, now.images, now.sentences)
        soft_loss = partial(
            actor_loss,
            alpha=self.temperatures[PARAMETERS],
            alpha_primitives=0.0 if choice is None else self.temperatures[CHOICE],
            reduction=self._actor_reduction,
            mask=batch.mask,
            num_rows=float(self.config.batch.train_batch_size),
            dp_size=self._strategy.world_size,
        )
        if choice is None:
            loss = soft_loss(q_values, log_probs[:, 0])
        elif self._episodes < self._sac.choice_exploration:  # rollouts draw the primitive uniformly
            uniform = torch.zeros_like(choice).log_softmax(-1)
            loss = soft_loss(q_values, log_probs, uniform)
            loss = loss + soft_loss(q_values.detach(), log_probs.detach(), choice)
        else:
            loss = soft_loss(q_values, log_probs, choice)
        if matching_losses is not None:
            loss = loss + self._matching_loss(matching_losses, q_values.detach(), batch, metrics)
        norm = self.actor.backward(loss, last=True)
        self._check_step("actor", norm)
        self._adapt_temperatures(log_probs.detach(), None if choice is None else choice.detach(), batch.mask, metrics)
        metrics.mean({"actor/loss": loss.detach(), "actor/grad_norm": norm or 0.0}, 1.0)

    def _matching_batch(self, batch: Batch) -> MatchingBatch | None:
        """Stored decisions for the flow-matching loss; None without this loss."""
        width = self._policy.matching_noise
        if not width or not self._sac.flow_matching_coef:
            return None
        noise = torch.randn(len(batch.actions), width, generator=self._noise).to(batch.actions.device)
        return MatchingBatch(batch.actions, batch.steps, noise)

    def _matching_loss(self, losses: Tensor, q_values: Tensor, batch: Batch, metrics: Metrics) -> Tensor:
        """Flow-matching term of the actor loss, over demonstrations, or without any over decisions of higher value.

        Args:
            losses: [B] of the stored decisions.
            q_values: [M, B] of the policy's decisions.
            batch: the batch.
            metrics: of the update.
        """
        imitated = batch.demonstrated
        if self._demos is None:  # Q-filter (Nair et al. 2018)
            with torch.no_grad():
                now = batch.now
                stored = self.critic.module(batch.actions, now.proprio, now.images, now.sentences)
            stored, sampled = (reduce_critics(values, self._actor_reduction) for values in (stored, q_values))
            imitated = stored > sampled
        kept = batch.mask & imitated
        metrics.mean({"actor/flow_matching": losses.detach()[kept].mean()}, float(kept.sum()))
        metrics.mean({"actor/imitated_share": kept.float().mean()}, float(batch.mask.sum()))
        return self._sac.flow_matching_coef * imitation_loss(
            losses,
            imitated.float(),
            mask=batch.mask,
            num_rows=float(self.config.batch.train_batch_size),
            dp_size=self._strategy.world_size,
        )

    def _adapt_temperatures(self, log_probs: Tensor, choice: Tensor | None, mask: Tensor, metrics: Metrics) -> None:
        sac, kept = self._sac, mask.float()
        entropy, of_choice = self._policy.entropies(log_probs, choice)
        targets = parameter_target_entropy(self._policy.parameter_mask, self._target_entropy).to(log_probs.device)
        target = targets[0] if choice is None else over_primitives(choice, targets.expand_as(choice))
        gaps = {PARAMETERS: float(((entropy - target) * kept).sum())}
        if of_choice is not None:
            goal = primitive_target_entropy(len(self._policy.parameter_mask), sac.primitive_target_entropy)
            gaps[CHOICE] = float(((of_choice - goal) * kept).sum())
        total = float(self.config.batch.train_batch_size)
        gaps = {name: gap / total for name, gap in self._strategy.all_reduce(gaps, "sum").items()}
        if all(math.isfinite(gap) for gap in gaps.values()):
            self.temperatures.step(gaps)
        metrics.mean({"actor/entropy": entropy[mask].mean()}, float(kept.sum()))
        if of_choice is not None:
            metrics.mean({"actor/choice_entropy": of_choice[mask].mean()}, float(kept.sum()))

    def _check_step(self, model: str, norm: float | None) -> None:
        """End the run after several steps in a row whose gradient was not finite; they were skipped."""
        finite = norm is not None and math.isfinite(norm)
        self._bad_steps[model] = 0 if finite else self._bad_steps[model] + 1
        limit = self.config.guards.max_bad_steps
        if self._bad_steps[model] >= limit:
            raise TrainingHalted(
                f"{limit} updates of the {model} in a row had NaN or infinity in loss or gradient: the critics have "
                "diverged, or a reward is not finite. Take a smaller learning rate or --tau, or look at the rewards"
            )

    def _replay_metrics(self, metrics: Metrics) -> dict[str, float]:
        buffer = self.memory.buffer
        metrics.total({"replay/rows": float(len(buffer)), "replay/episodes": float(buffer.num_episodes)})
        if self._hindsight is not None:
            metrics.total({"replay/relabelled": float(self.memory.relabelled)})
        if self.config.replay.replay_score_source is not None:
            metrics.mean({"replay/unjudged_share": buffer.missing_score_fraction}, float(len(buffer)))
        return {"critic/updates": float(self.updates)}

    # ------------------------------------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """Counters, and the state of the task sampler."""
        counters: dict[str, Any] = {"updates": self.updates, "episodes": self._episodes, "owed": self.pending_updates}
        counters |= {"normalized": self._normalized, "bad_steps": self._bad_steps}
        return {"sac": counters | {"base_files": self._policy.base_files}, "task_sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; ConfigError if the files that the policy depends on have changed."""
        counters = state["sac"]
        before, now = counters.get("base_files", {}), self._policy.base_files
        changed = sorted({name for name, _ in before.items() ^ now.items()})
        if changed:
            text = "the policy whose noise is chosen has changed since this run began, and its replay buffer with it"
            raise ConfigError.of("pretrain", "changed", f"--pretrain: {text}: {', '.join(changed)}; restore the files")
        self.updates, self._episodes, self.pending_updates = counters["updates"], counters["episodes"], counters["owed"]
        self._normalized, self._bad_steps = counters["normalized"], dict(counters["bad_steps"])
        self._sampler.load_state_dict(state.get("task_sampler"))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The target critics and the temperatures."""
        target = {name: value.cpu() for name, value in self._target.state_dict().items()}
        mean, std = self._target.proprio_normalization()
        proprio = {"mean": mean.cpu(), "std": std.cpu()}
        return {"target": target, "temperatures": self.temperatures.state_dict(), "proprio": proprio}

    def load_tensors(self, tensors: Mapping[str, dict[str, Tensor]]) -> None:
        """Restore `tensors`."""
        self._target.load_state_dict(tensors["target"])
        self._set_normalization(**tensors["proprio"])  # engines of another number of ranks may lack buffers
        self.temperatures.load_state_dict(tensors["temperatures"])

    def rank_state_dict(self) -> dict[str, Any]:
        """The generators of this rank and the saved state of its buffer, whose changes are written to disk."""
        generators = {"rng": self._rng.bit_generator.state, "shared_rng": self._shared_rng.bit_generator.state}
        noise = {"noise": self._noise.get_state(), "shared_noise": self._shared_noise.get_state()}
        saved: dict[str, Any] = {"world_size": self._strategy.world_size}
        if self._rescoring is not None:
            saved["rescoring"] = self._rescoring.state_dict()
        return saved | {"memory": self.memory.save(), **generators, **noise}

    def state_damage(self, states: Sequence[dict[str, Any]]) -> str | None:
        """Defect of a replay buffer; one of other settings is left to `load_rank_state_dict`, which refuses it."""
        for rank, state in enumerate(states):
            memory = Memory(self._policy, self.config.replay, self._folder(rank, state["world_size"]))
            try:
                memory.load(state["memory"], only=False)
            except ConfigError as error:
                if error.problems[0].reason in ("invalid_file", "missing_file"):
                    return str(error)
            else:
                memory.buffer.close()
        return None

    def checkpoint_written(self) -> None:
        """Delete states of the buffer that none of the newest checkpoints needs."""
        self.memory.checkpoint_written(self.config.schedule.max_ckpt_num)

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `rank_state_dict`."""
        if self.config.schedule.val_only:  # loading a buffer deletes its later states
            return
        self.memory.load(state["memory"])
        if self._rescoring is not None and "rescoring" in state:
            self._rescoring.load_state_dict(state["rescoring"], self.memory)
        self._rng.bit_generator.state = state["rng"]
        self._shared_rng.bit_generator.state = state["shared_rng"]
        self._noise.set_state(state["noise"])
        self._shared_noise.set_state(state["shared_noise"])

    def reshard_state(self, states: Sequence[dict[str, Any]]) -> str:
        """Distribute the stored episodes over the ranks; their priorities are reset."""
        strategy = self._strategy
        if self.config.schedule.val_only:
            return "the replay buffers are left alone"
        saved = [(self._folder(n, state["world_size"]), state["memory"]) for n, state in enumerate(states)]
        for rank in range(strategy.world_size):  # one after the other: loading deletes files
            if rank == strategy.rank:
                self.memory.take_over(saved, slice(rank, None, strategy.world_size))
            strategy.barrier()
        return "the episodes of the replay buffers are dealt out to them and their priorities start anew"


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Inside the block the parameters of a module, all of which are trained, receive no gradient."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


class Temperatures:
    """Temperatures alpha = exp(log alpha), each raised while its entropy is below its target (Adam on log alpha).

    Equal on all ranks as long as they are given the same gaps.

    Args:
        initial: name -> temperature at the start.
        learning_rate: 0 keeps them.
    """

    def __init__(self, initial: Mapping[str, float], learning_rate: float):
        self._names, self._rate = tuple(initial), learning_rate
        self._log = torch.tensor([math.log(value) for value in initial.values()], dtype=torch.float64)
        self._first, self._second = torch.zeros_like(self._log), torch.zeros_like(self._log)
        self._steps = torch.zeros((), dtype=torch.float64)

    def __getitem__(self, name: str) -> float:
        """The temperature of this name."""
        return float(self._log[self._names.index(name)].exp())

    def values(self) -> dict[str, float]:
        """All temperatures by name."""
        return {name: self[name] for name in self._names}

    def step(self, gaps: Mapping[str, float]) -> None:
        """One step from the mean of (entropy - target) for each, the gradient of `temperature_loss`."""
        gradient = torch.tensor([gaps[name] for name in self._names], dtype=torch.float64)
        self._steps += 1
        self._first.lerp_(gradient, 1 - _BETAS[0])
        self._second.lerp_(gradient.square(), 1 - _BETAS[1])
        scale = (self._second / (1 - _BETAS[1] ** self._steps)).sqrt() + _EPS
        self._log -= self._rate * self._first / (1 - _BETAS[0] ** self._steps) / scale

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name."""
        return {"log": self._log, "first": self._first, "second": self._second, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state_dict`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
