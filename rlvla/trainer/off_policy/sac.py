"""Soft actor-critic on replayed decisions: plain chunks or action primitives, with or without demonstrations."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlvla.algorithms.off_policy import (
    actor_loss,
    critic_loss,
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
from rlvla.experience import Sample
from rlvla.models.distributions import sample_by_inverse_cdf
from rlvla.models.soft_actor.network import SoftCritic, stored_actions
from rlvla.models.soft_actor.policy import SoftActorPolicy
from rlvla.replay.buffer import Drawn
from rlvla.replay.sampling import linear_schedule
from rlvla.trainer.algorithm import Algorithm, AlgorithmSetup, Plan, register_algorithm, show_sampler
from rlvla.trainer.measurements import Stopwatch
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_writer import OFF_POLICY_OVERVIEW, Layout, off_policy_layout
from rlvla.trainer.off_policy.config import OffPolicyConfig
from rlvla.trainer.off_policy.hindsight import Hindsight
from rlvla.trainer.off_policy.memory import Batch, Memory, Observations, draw_share, make_batch, weigh_as_ones
from rlvla.trainer.off_policy.rescoring import Rescoring
from rlvla.trainer.off_policy.temperatures import Temperatures
from rlvla.utils.errors import ConfigError, TrainingHalted
from rlvla.utils.seeding import derive_rng, derive_seed

NAME = "sac"
PARAMETERS, CHOICE = "parameters", "choice"


@register_algorithm(NAME)
class SAC(Algorithm):
    """Soft actor-critic (Haarnoja et al. 2018) with an ensemble of critics, n-step targets and prioritised replay.

    With action primitives the policy is pi(k | s) pi(x | s, k) (MAPLE, Nasiriany et al. 2022).

    Attributes:
        updates: updates of the critics so far.
        memory: what was played.
    """

    overview = OFF_POLICY_OVERVIEW

    def __init__(self, setup: AlgorithmSetup):
        super().__init__(setup)
        config: Any = setup.config
        if not isinstance(config, OffPolicyConfig):
            raise ConfigError.of("algorithm", "mismatch", "--algorithm sac is trained by cli/train_sac_vla.py")
        self.config, self._sac, self._strategy = config, config.sac, setup.strategy
        models: Any = setup.models
        self._policy: SoftActorPolicy = models.actor
        self.actor = setup.prepare(models.actor, self._sac.actor_learning_rate, 1, small=True)
        self._target: SoftCritic = copy.deepcopy(models.critic).requires_grad_(False)
        self._target.to(self._strategy.device)
        self.critic = setup.prepare(models.critic, self._sac.critic_learning_rate, 1, small=True)
        names = (PARAMETERS, CHOICE) if self._policy.config.primitives else (PARAMETERS,)
        initial = dict.fromkeys(names, self._sac.init_temperature)
        self.temperatures = Temperatures(initial, self._sac.temperature_learning_rate)
        rank = self._strategy.rank
        replay = config.replay
        self.memory = Memory(self._policy, replay, self._folder(rank, self._strategy.world_size))
        self._demos = None if setup.demos is None else self._demonstrated(setup.demos)
        self._hindsight: Hindsight | None = None
        if config.replay.her_ratio:
            assert config.machines is not None  # checked with the flags
            self._hindsight = Hindsight(config.replay, config.machines, setup.tasks, config.success_reward)
        self._rescoring: Rescoring | None = None
        if replay.replay_rescore_interval:
            every, budget = replay.replay_rescore_interval, replay.replay_rescore_budget
            self._rescoring = Rescoring(config.judge, setup.tasks, every, budget)
        self._sampler = setup.sampler()
        self._rng = derive_rng(setup.strategy.seed, "replay", rank)
        self._shared_rng = derive_rng(setup.strategy.seed, "replay of all ranks")
        self._noise = torch.Generator().manual_seed(derive_seed(setup.strategy.seed, "noise of updates", rank))
        self._shared_noise = torch.Generator().manual_seed(derive_seed(setup.strategy.seed, "critics of targets"))
        self.updates, self._episodes, self._owed = 0, 0, 0.0
        self._played = self._normalized = False
        self._bad_steps = {"actor": 0, "critic": 0}

    def layout(self, rewards: Iterable[str]) -> Layout:
        """Charts of values, temperatures and the replay buffer instead of PPO's."""
        return off_policy_layout(rewards)

    def _folder(self, rank: int, world_size: int) -> Path:
        return self.config.replay_folder / f"rank_{rank}_of_{world_size}"

    @property
    def engines(self) -> dict[str, Any]:
        """Actor and critics."""
        return {"actor": self.actor, "critic": self.critic}

    # ------------------------------------------------------------------------------------------------ playing
    def plan(self, iteration: int) -> Plan | None:
        """The episodes of this rank; the first ones of a run are played at random."""
        self._policy.at_random = self._policy.choice_at_random = False
        if self._played:
            self._played = False
            return None
        self._played = True
        self._policy.at_random = self._episodes < self.config.batch.random_episodes
        self._policy.choice_at_random = self._episodes < self._sac.choice_exploration
        everywhere = self.config.batch.rollout_batch_size
        share = everywhere // self._strategy.world_size
        first = iteration * everywhere + share * self._strategy.rank
        return Plan(self._sampler.at(range(first, first + share)))

    def interrupt(self) -> None:
        """The iteration is planned again."""
        self._played = self._policy.at_random = self._policy.choice_at_random = False

    def ingest(self, samples: Sequence[Sample]) -> None:
        """Put the episodes into the replay buffer.

        Raises:
            TrainingHalted: on all ranks: a reward of one of them is NaN or infinite, or they cannot be written.
        """
        spoilt = [f"{s.suite}, initial state {s.init_state_id}" for s in samples if not torch.isfinite(s.rewards).all()]
        everywhere = [episode for part in self._strategy.gather_objects(spoilt) for episode in part]
        if everywhere:
            raise TrainingHalted(
                f"rewards hold NaN or infinity ({everywhere[0]}), which would spoil all values; look at the reward "
                "sources (--reward)"
            )
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
        full = [text for text in self._strategy.gather_objects(problem) if text is not None]
        if full:
            raise TrainingHalted(f"the replay buffer cannot take the episodes: {full[0]}")
        show_sampler(self._sampler, samples, self._strategy)
        counts = {"episodes": float(len(samples)), "decisions": float(sum(s.num_decisions for s in samples))}
        counts = self._strategy.all_reduce(counts, "sum")
        self._episodes += int(counts["episodes"])
        self._owed += counts["decisions"] * self.config.batch.utd_ratio

    def is_idle(self, values: Mapping[str, float]) -> bool:
        """Never: what was played before is learned from as well."""
        return False

    # ------------------------------------------------------------------------------------------------ updating
    def update(self, metrics: Metrics) -> dict[str, float]:
        """As many updates as the decisions played so far allow."""
        rows = self._strategy.all_reduce({"rows": float(len(self.memory.buffer))}, "min")["rows"]
        if self._episodes < self.config.batch.random_episodes or not rows:
            return self._replay_metrics(metrics)
        self._normalize()
        watch = Stopwatch("timing_s/replay", "timing_s/update")
        self.actor.train(True)
        self.critic.train(True)
        for _ in range(int(self._owed)):
            self._owed -= 1.0
            with watch.phase("timing_s/replay"):
                drawn, batch = self._draw()
            with watch.phase("timing_s/update"):
                errors = self._update_critics(batch, metrics)
                self.updates += 1
                if self.updates % self.config.batch.actor_interval == 0:
                    self._update_actor(batch, metrics)
                update_target(self._target, self.critic.module, self._sac.tau)
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
        parts = [self.memory.rows(drawn, self._sac.n_step, self._sac.gamma)]
        if self._demos is not None:
            # Demonstrations weigh 1; what was played weighs as much on average, however it was drawn.
            weigh_as_ones(parts[0], self._strategy)
            shown = self._demos.buffer.sample(demonstrated, self._rng, share=0.0)
            parts.append(self._demos.rows(shown, self._sac.n_step, self._sac.gamma))
        batch = make_batch(parts, self._policy, self._strategy.device)
        if self._sac.image_shift:
            for seen in (batch.now, batch.later):
                assert seen.images is not None  # checked with the flags
                seen.images = random_shift(seen.images, self._sac.image_shift, self._noise)
        return drawn, batch

    def _demonstrated(self, demos: Demonstrations) -> Memory:
        """This rank's share of the demonstrations, in a buffer of their own, made anew at each start."""
        rank, weights = self._strategy.rank, self.config.reward_weights()
        share = range(rank, len(demos.actions), self._strategy.world_size)
        success = weights.get("success", 0.0) * self.config.success_reward + weights.get("env", 0.0)
        folder = self.config.replay_folder / f"demos_rank_{rank}"
        return Memory.of_demonstrations(self._policy, demos, share, self._sac.reward_scale * success, folder)

    def _refresh(self, metrics: Metrics) -> None:
        """Compute old TD errors again, see --replay_refresh_interval."""
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
            found = self.memory.rows(Drawn(rows, episodes, ones, ones), self._sac.n_step, self._sac.gamma)
            batch = make_batch([found], self._policy, self._strategy.device)
            with torch.no_grad():
                targets, now = self._targets(batch, self._noise), batch.now
                q_values = self.critic.module(batch.actions, now.proprio, now.images, now.sentences)
                _, errors = critic_loss(q_values, targets)
            self._prioritise(rows, episodes, errors.cpu().numpy())
        metrics.total({"replay/refreshed": float(len(due))})

    def _rescore(self, metrics: Metrics) -> None:
        """Ask the judge again, see --replay_rescore_interval; it answers while the next episodes are played."""
        if self.config.replay.replay_score_source is None:
            return
        age = self.memory.buffer.score_age(self.updates)
        metrics.mean({"replay/score_age_mean": age}, float(not math.isnan(age)))
        if self._rescoring is None or self._episodes >= self.config.batch.num_episodes:
            return
        metrics.total({"replay/rescored": float(self._rescoring.ask(self.memory, self.updates))})

    def _prioritise(self, rows: np.ndarray, episodes: np.ndarray, errors: np.ndarray) -> None:
        """Set priorities by TD errors; one that is not finite says nothing, and its step was skipped."""
        finite = np.isfinite(errors)
        if finite.any():
            self.memory.buffer.update(rows[finite], episodes[finite], now=self.updates, td_error=errors[finite])

    @torch.no_grad()
    def _normalize(self) -> None:
        """Set the normalisation of proprio from everything played, once."""
        if self._normalized:
            return
        self._normalized = True
        if not len(self._target.encoder.mean):
            return
        counts, totals, squares = zip(*self._strategy.gather_objects(self.memory.proprio_sums()))
        mean = torch.from_numpy(sum(totals) / sum(counts))
        std = (torch.from_numpy(sum(squares) / sum(counts)) - mean.square()).clamp_min(0.0).sqrt()
        self._set_normalization(mean.float(), std.float())

    @torch.no_grad()
    def _set_normalization(self, mean: Tensor, std: Tensor) -> None:
        self._policy.encoder.set_normalization(self._policy.own(mean), self._policy.own(std))
        for critics in (self.critic.module, self._target):
            critics.encoder.set_normalization(mean, std)

    def _sampled(self, seen: Observations, actor: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """For every primitive parameters [B, n, D] and their log-densities [B, n]; log-probs [B, n] of the choice."""
        rows = len(seen.proprio if seen.proprio is not None else seen.images)  # type: ignore[arg-type]
        network = self._policy.network
        noise = torch.randn(rows, network.kinds, network.width, generator=self._noise).to(self._strategy.device)
        proprio = None if seen.proprio is None else self._policy.own(seen.proprio)
        values, densities, choice = actor(proprio, seen.images, seen.sentences, noise)
        return values, densities.sum(-1), choice

    def _judged(self, values: Tensor, choice: Tensor | None) -> Tensor:
        """Decisions for every primitive [B, n, D] as critics read them, [B, n, E]; [B, E] without primitives."""
        if choice is None:
            return values[:, 0]
        kinds = torch.arange(values.shape[1], device=values.device).expand(len(values), -1)
        return stored_actions(values, self._policy.mask, kinds)

    def _update_critics(self, batch: Batch, metrics: Metrics) -> np.ndarray:
        """One step of the critics; returns the absolute TD errors [B]."""
        rows, targets, now = self.config.batch.train_batch_size, self._targets(batch, self._shared_noise), batch.now
        q_values = self.critic(batch.actions, now.proprio, now.images, now.sentences)
        loss, errors = critic_loss(
            q_values,
            targets,
            weights=batch.weights,
            mask=batch.mask,
            num_rows=float(rows),
            dp_size=self._strategy.world_size,
        )
        norm = self.critic.backward(loss, last=True)
        self._check_step("critic", norm)
        kept = batch.mask
        found = {"critic/q_mean": q_values.detach()[:, kept].mean(), "critic/target_mean": targets[kept].mean()}
        found |= {"critic/td_error": errors[kept].mean(), "replay/is_weight_mean": batch.weights[kept].mean()}
        metrics.mean(found, float(batch.mask.sum()))
        metrics.mean({"critic/loss": loss.detach(), "critic/grad_norm": norm or 0.0}, 1.0)
        return errors.cpu().numpy()

    def _targets(self, batch: Batch, subsets: torch.Generator) -> Tensor:
        """[B]: what the critics are to predict; `subsets` draws those whose smallest value counts."""
        sac = self._sac
        with torch.no_grad():
            values, log_probs, choice = self._sampled(batch.later, self._policy)
            chosen = torch.zeros(len(values), dtype=torch.long, device=values.device)
            if choice is not None:
                uniform = torch.rand(len(values), 1, generator=self._noise).to(values.device)
                chosen = sample_by_inverse_cdf(choice[:, None], uniform)[:, 0]
            row = torch.arange(len(values), device=values.device)
            action = stored_actions(values[row, chosen], self._policy.mask, None if choice is None else chosen)
            some = sac.target_critics < sac.n_critics
            critics = random_critics(sac.n_critics, sac.target_critics, subsets) if some else None
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
        sac, rows, seen = self._sac, float(self.config.batch.train_batch_size), batch.now
        values, log_probs, choice = self._sampled(seen, self.actor)
        critic: Any = self.critic.module
        with _frozen(critic):
            q_values = critic(self._judged(values, choice), seen.proprio, seen.images, seen.sentences)
        options = {"reduction": sac.actor_reduction, "mask": batch.mask, "num_rows": rows}
        options |= {"alpha": self.temperatures[PARAMETERS], "dp_size": self._strategy.world_size}
        if choice is None:
            loss = actor_loss(q_values, log_probs[:, 0], **options)
        else:
            options["alpha_primitives"] = self.temperatures[CHOICE]
            if self._episodes < sac.choice_exploration:  # what plays then has a uniform choice
                uniform = torch.zeros_like(choice).log_softmax(-1)
                loss = actor_loss(q_values, log_probs, uniform, **options)
                loss = loss + actor_loss(q_values.detach(), log_probs.detach(), choice, **options)
            else:
                loss = actor_loss(q_values, log_probs, choice, **options)
        norm = self.actor.backward(loss, last=True)
        self._check_step("actor", norm)
        self._adapt_temperatures(log_probs.detach(), None if choice is None else choice.detach(), batch.mask, metrics)
        metrics.mean({"actor/loss": loss.detach(), "actor/grad_norm": norm or 0.0}, 1.0)

    def _adapt_temperatures(self, log_probs: Tensor, choice: Tensor | None, mask: Tensor, metrics: Metrics) -> None:
        sac, kept = self._sac, mask.float()
        entropy, of_choice = self._policy.entropies(log_probs, choice)
        targets = parameter_target_entropy(self._policy.mask, sac.target_entropy).to(log_probs.device)
        target = targets[0] if choice is None else over_primitives(choice, targets.expand_as(choice))
        gaps = {PARAMETERS: float(((entropy - target) * kept).sum())}
        if of_choice is not None:
            goal = primitive_target_entropy(self._policy.network.kinds, sac.primitive_target_entropy)
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
        counters = {"updates": self.updates, "episodes": self._episodes, "owed": self._owed}
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
        self.updates, self._episodes, self._owed = counters["updates"], counters["episodes"], counters["owed"]
        self._normalized, self._bad_steps = counters["normalized"], dict(counters["bad_steps"])
        self._sampler.load_state_dict(state.get("task_sampler"))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The target critics and the temperatures."""
        target = {name: value.cpu() for name, value in self._target.state_dict().items()}
        encoder = self._target.encoder
        scale = {"mean": encoder.mean.cpu(), "std": encoder.std.cpu()}
        return {"target": target, "temperatures": self.temperatures.state_dict(), "proprio": scale}

    def load_tensors(self, tensors: Mapping[str, dict[str, Tensor]]) -> None:
        """Restore `tensors`."""
        self._target.load_state_dict(tensors["target"])
        self._set_normalization(**tensors["proprio"])  # engines of another number of ranks may lack buffers
        self.temperatures.load_state_dict(tensors["temperatures"])

    def rank_state_dict(self) -> dict[str, Any]:
        """The buffer and the generators of this rank; writes what has changed in the buffer."""
        generators = {"rng": self._rng.bit_generator.state, "shared_rng": self._shared_rng.bit_generator.state}
        noise = {"noise": self._noise.get_state(), "shared_noise": self._shared_noise.get_state()}
        saved: dict[str, Any] = {"world_size": self._strategy.world_size}
        if self._rescoring is not None:
            saved["rescoring"] = self._rescoring.state_dict()
        return saved | {"memory": self.memory.save(), **generators, **noise}

    def checkpoint_written(self) -> None:
        """Give up states of the buffer that none of the newest checkpoints needs."""
        self.memory.checkpoint_written(self.config.schedule.max_ckpt_num)

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `rank_state_dict`."""
        if self.config.schedule.val_only:  # reading a buffer gives up what was saved of it later
            return
        self.memory.load(state["memory"])
        if self._rescoring is not None and "rescoring" in state:
            self._rescoring.load_state_dict(state["rescoring"], self.memory)
        self._rng.bit_generator.state = state["rng"]
        self._shared_rng.bit_generator.state = state["shared_rng"]
        self._noise.set_state(state["noise"])
        self._shared_noise.set_state(state["shared_noise"])

    def share_out(self, states: Sequence[dict[str, Any]]) -> str:
        """Deal out the episodes of all ranks; their priorities start anew."""
        strategy = self._strategy
        if self.config.schedule.val_only:
            return "the replay buffers are left alone"
        saved = [(self._folder(n, state["world_size"]), state["memory"]) for n, state in enumerate(states)]
        for rank in range(strategy.world_size):  # one after the other: reading tidies up
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
