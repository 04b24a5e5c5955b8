"""The two data types of an iteration: `Sample` (an episode) and `Experience` (a batch of decisions).

S = decisions (chunks) of an episode, A = actions per chunk, D = action dimensions, K = log-probs of a decision
(A * D for policies whose action dimensions are independent), N = cameras, P = proprio dimensions, B = rows
(decisions) of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

# Images [..., N, H, W, 3] and proprio [..., P] of the environment as a policy reads them; see `RolloutPolicy.prepare`.
Prepare = Callable[[np.ndarray, np.ndarray | None], tuple[np.ndarray, np.ndarray | None]]


@dataclass
class Sample:
    """One finished episode; nothing changes it once the rollout engine has returned it.

    Attributes:
        images: [S, N, H, W, 3] uint8, observation at each decision, prepared for the policy's network.
        proprio: [S, P] float32 as the network reads it (normalized), or None.
        instruction: the language command.
        actions: [S, A, D] float32, as passed to the environment.
        executed: [S, A] bool, actions that the environment executed.
        step_actions: [finish_step, E] float32, the ordinary action of each environment step if decisions are primitives
            that report it, or the scripted expert intervened; None otherwise.
        interventions: [finish_step] bool, the steps of the scripted expert; None if it does not intervene.
        trace: inputs for scoring the decisions again, name -> [S, ...]; for token policies `tokens` [S, K] int64,
            columns of the action vocabulary in the order (action index, dim).
        log_probs: [S, K] float32, at sampling time and at the sampling temperature; K log-probs per decision, in the
            order (action index, dim).
        rewards: [S, A] float32 per executed env step, the sum of the reward sources.
        reward_components: each source on its own, name -> [S, A].
        finish_step: environment steps executed.
        success_once: the success predicate held at some step.
        success_at_end: success was held (long enough) when the episode ended.
        regressions: number of times success was lost.
        simulator_once, simulator_at_end: with a model-based success detector (`--success_source`), whether the
            simulator's predicate held at some step, and after the last one; None otherwise.
        unanswered: questions to that model without an answer.
        terminated: the episode ended with success or failure; its value is not bootstrapped.
        truncated: a limit was reached; its last value is bootstrapped.
        last_images, last_proprio: the observation after the last action, for that bootstrap.
        observed_images: [S + 1, N, H, W, 3] uint8 as rendered, including the observation after the last action; None
            if equal to `images`, or if not requested.
        images_as_rendered: whether `images` are as rendered.
        observed_proprio: [S + 1, P] float32 as returned by the environment, or None.
        critic_state: [S + 1, C] float32, privileged state for a critic: elapsed share of `max_steps`, state of a reward
            machine (`state_width`), proprio with privileged state; None without `RolloutEngine(policy_proprio=...)`.
        frames: [F, H, W, 3] uint8 after each executed step, if requested.
        step_events: propositions and success of each executed step, kept with frames and if the policy observes the
            state of a reward machine.
        prompted_instructions: S + 1 strings, the instruction in the prompt of each decision and after the last action;
            None if equal to `instruction`.
        state_width: number of the last entries of `proprio` that are the state of a reward machine.
        reward_info: numbers that reward sources report of the episode, e.g. fallbacks of a machine.
        scores: action score and progress of each decision, source -> [S, 2] float32 in [0, 1], NaN if not judged.
        uid: the group: episodes of one uid started from the same task instance.
        suite, task_id, init_state_id, seed: the task instance.
        images_flipped_vertically: see `TaskSpec`.
        versions: [S] int64, training iterations of the weights of each decision; None: not counted.
    """

    images: torch.Tensor
    proprio: torch.Tensor | None
    instruction: str
    actions: torch.Tensor | None
    executed: torch.Tensor
    trace: dict[str, torch.Tensor]
    log_probs: torch.Tensor
    rewards: torch.Tensor
    reward_components: dict[str, torch.Tensor]
    finish_step: int
    success_once: bool
    success_at_end: bool
    terminated: bool
    truncated: bool
    last_images: torch.Tensor
    last_proprio: torch.Tensor | None
    uid: str
    suite: str
    task_id: int
    init_state_id: int
    seed: int
    observed_images: torch.Tensor | None = None
    observed_proprio: torch.Tensor | None = None
    critic_state: torch.Tensor | None = None
    images_as_rendered: bool = True
    frames: Any = None
    reward_info: dict[str, float] = field(default_factory=dict)
    scores: dict[str, torch.Tensor] = field(default_factory=dict)
    step_actions: torch.Tensor | None = None
    interventions: torch.Tensor | None = None
    regressions: int = 0
    simulator_once: bool | None = None
    simulator_at_end: bool | None = None
    unanswered: int = 0
    step_events: list[tuple[frozenset[str], bool]] | None = None
    prompted_instructions: list[str] | None = None
    state_width: int = 0
    images_flipped_vertically: bool = False
    versions: torch.Tensor | None = None

    @property
    def action_tokens(self) -> torch.Tensor:
        """[S, K] int64 of a token policy; KeyError for others."""
        return self.trace["tokens"]

    @property
    def rollout_log_probs(self) -> torch.Tensor:
        """`log_probs`, by the name it has in `Experience`."""
        return self.log_probs

    @property
    def action_mask(self) -> torch.Tensor:
        """[S, K] bool: `executed` for each log-prob."""
        return self.executed.repeat_interleave(self.log_probs.shape[1] // self.executed.shape[1], dim=1)

    @property
    def env_images(self) -> torch.Tensor:
        """[S + 1, N, H, W, 3] uint8 as rendered, including the observation after the last action.

        Raises:
            ValueError: the policy sees other images, and the rendered ones were not kept.
        """
        if self.observed_images is not None:
            return self.observed_images
        if not self.images_as_rendered:
            raise ValueError("the environment's images were not kept; play with RolloutEngine(keep_observed=True)")
        return torch.cat([self.images, self.last_images[None]])

    @property
    def env_proprio(self) -> torch.Tensor | None:
        """[S + 1, P] float32 as returned by the environment, without the state of a reward machine."""
        proprio = self.observed_proprio
        return None if proprio is None else proprio[:, : proprio.shape[1] - self.state_width]

    @property
    def played_actions(self) -> torch.Tensor:
        """[finish_step, E] float32: the ordinary action of each environment step, see `step_actions`."""
        if self.step_actions is not None:
            return self.step_actions
        assert self.actions is not None
        return self.actions[self.executed]

    @property
    def decision_instructions(self) -> list[str]:
        """S strings: the instruction in the prompt of each decision."""
        prompted = self.prompted_instructions
        return [self.instruction] * self.num_decisions if prompted is None else prompted[:-1]

    @property
    def last_instruction(self) -> str:
        """The instruction for a prompt after the last action."""
        return self.instruction if self.prompted_instructions is None else self.prompted_instructions[-1]

    @property
    def num_decisions(self) -> int:
        """S."""
        return self.images.shape[0]

    @property
    def last_action(self) -> int:
        """Index of the last executed action in the flat [S * A] grid of the episode."""
        return int(self.executed.flatten().nonzero()[-1])

    @property
    def score(self) -> float:
        """Episode reward: the sum over executed steps."""
        return float(self.rewards.sum())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled episode; checkpoints before version 0.2 have other fields (see `prepared`)."""
        if "executed" not in state:
            state = _fields_since_0_2(state)
        self.__dict__.update({"scores": {}, **state})

    def prepared(self, prepare: Prepare) -> Sample:
        """The episode with prepared observations if it is from a checkpoint before version 0.2; else itself."""
        if self.actions is not None:
            return self
        observed_images = torch.cat([self.images, self.last_images[None]])
        observed_proprio = None
        if self.proprio is not None and self.last_proprio is not None:
            observed_proprio = torch.cat([self.proprio, self.last_proprio[None]])
        images, proprio = prepare(
            observed_images.numpy(), None if observed_proprio is None else observed_proprio.numpy()
        )
        return replace(
            self,
            actions=torch.zeros(*self.executed.shape, 1),  # not kept then, not needed now
            images=torch.from_numpy(images[:-1]),
            last_images=torch.from_numpy(images[-1]),
            proprio=None if proprio is None else torch.from_numpy(proprio[:-1]),
            last_proprio=None if proprio is None else torch.from_numpy(proprio[-1]),
            observed_images=observed_images,
            observed_proprio=observed_proprio,
            images_as_rendered=False,
        )


def _fields_since_0_2(state: dict[str, Any]) -> dict[str, Any]:
    """The fields of a pickled `Sample` from an older checkpoint under their current names; it has no actions."""
    state = dict(state)
    mask, steps = state.pop("action_mask"), state["rewards"].shape[1]
    renamed = {"trace": "step_events", "told": "prompted_instructions", "rows_from_below": "images_flipped_vertically"}
    state = {renamed.get(name, name): value for name, value in state.items()}
    state["executed"] = mask.unflatten(1, (steps, -1)).any(-1)
    state["trace"] = {"tokens": state.pop("action_tokens")}
    state["log_probs"] = state.pop("rollout_log_probs")
    return {"actions": None, "observed_images": None, "observed_proprio": None, **state}


def _step(fill: float | bool = 0) -> Any:
    """A [B, T] field; `fill` pads it along T."""
    return field(default=None, metadata={"role": "step", "fill": fill})


def _decision() -> Any:
    """A [B, ...] field: one entry per row, never padded; also a dict of such tensors."""
    return field(default=None, metadata={"role": "decision"})


def _each(value: Any, transform: Callable[[Any], Any]) -> Any:
    """A tensor or list transformed, or every entry of a dict of them; None stays None."""
    if isinstance(value, dict):
        return {name: transform(entry) for name, entry in value.items()}
    return None if value is None else transform(value)


@dataclass
class Experience:
    """A batch of decisions, ready for an update. Every field is tagged "step" [B, K, ...] or "decision" [B, ...].

    Stacking, padding, indexing and moving between devices follow the tag; a new field is declared once, here.
    Absent fields are None.

    Attributes:
        images: [B, N, H, W, 3] uint8, as in `Sample`.
        proprio: [B, P] float32, as in `Sample`.
        instructions: B strings.
        critic_state: [B, C] float32, normalized privileged state for a critic.
        row_weights: [B] float32, factors on the supervised loss; None: 1.
        episode_index: [B] int64, episode of the rollout.
        trace: as in `Sample`, name -> [B, ...].
        reference: parameters of the reference policy's distributions, name -> [B, ...], for a loss on the exact KL.
        action_mask: [B, K] bool, log-probs of executed actions.
        policy_mask: [B, K] bool, log-probs that are trained: the subset of `action_mask` that affects the executed
            action.
        value_mask: [B, K] bool, columns at which the critic is evaluated and trained.
        old_log_probs: [B, K] of the actor before the update.
        rollout_log_probs: [B, K] at sampling time.
        ref_log_probs: [B, K] of the reference model.
        rollout_weights: [B, K] factors on the policy loss that correct for the gap between rollout and training.
        staleness: [B] int64, versions between the policy that decided and the one before the update, where
            `old_log_probs` are still those at sampling time.
        values: [B, K] of the critic before the update.
        advantages: [B, K].
        returns: [B, K].
    """

    images: torch.Tensor = _decision()
    proprio: torch.Tensor | None = _decision()
    instructions: list[str] = _decision()
    critic_state: torch.Tensor | None = _decision()
    row_weights: torch.Tensor | None = _decision()
    episode_index: torch.Tensor = _decision()
    trace: dict[str, torch.Tensor] | None = _decision()
    reference: dict[str, torch.Tensor] | None = _decision()
    action_mask: torch.Tensor = _step(False)
    policy_mask: torch.Tensor = _step(False)
    value_mask: torch.Tensor = _step(False)
    old_log_probs: torch.Tensor = _step()
    rollout_log_probs: torch.Tensor = _step()
    ref_log_probs: torch.Tensor | None = _step()
    rollout_weights: torch.Tensor | None = _step()
    staleness: torch.Tensor | None = _decision()
    values: torch.Tensor | None = _step()
    advantages: torch.Tensor = _step()
    returns: torch.Tensor = _step()

    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], effective_columns: torch.Tensor | None = None, first_episode: int = 0
    ) -> Experience:
        """One row per decision, in the order of the samples, without outputs of networks and estimators.

        An estimate for each episode, [episodes], is expanded to rows as `estimate[rows.episode_index]`.

        Args:
            samples: finished episodes of one policy.
            effective_columns: [K] bool, the log-probs to train, `Policy.effective_columns`; None: all.
            first_episode: `episode_index` of the first sample.

        Raises:
            ValueError: no samples, or proprio or trace entries in some samples only.
        """
        if not samples:
            raise ValueError("there are no samples to make rows of")
        kinds = {(sample.proprio is None, tuple(sorted(sample.trace))) for sample in samples}
        if len(kinds) > 1:
            raise ValueError("samples of different policies: some have proprio or a trace that others lack")
        mask = torch.cat([sample.action_mask for sample in samples])
        decisions = torch.tensor([sample.num_decisions for sample in samples])
        proprio = [sample.proprio for sample in samples if sample.proprio is not None]
        return cls(
            images=torch.cat([sample.images for sample in samples]),
            proprio=torch.cat(proprio) if proprio else None,
            instructions=[prompt for sample in samples for prompt in sample.decision_instructions],
            episode_index=first_episode + torch.arange(len(samples)).repeat_interleave(decisions),
            trace={name: torch.cat([sample.trace[name] for sample in samples]) for name in samples[0].trace},
            action_mask=mask,
            policy_mask=mask if effective_columns is None else mask & effective_columns,
            rollout_log_probs=torch.cat([sample.log_probs for sample in samples]),
        )

    @property
    def action_tokens(self) -> torch.Tensor:
        """[B, K] int64 of a token policy; KeyError for others."""
        if self.trace is None:
            raise KeyError("these rows hold no trace of decisions")
        return self.trace["tokens"]

    def __len__(self) -> int:
        """B."""
        return len(self.instructions)

    def _map(self, transform: Callable[[Any], Any]) -> Experience:
        changed = {f.name: _each(getattr(self, f.name), transform) for f in fields(self)}
        return Experience(**{name: value for name, value in changed.items() if value is not None})

    def index(self, rows: torch.Tensor) -> Experience:
        """The rows [M] (int64) in that order."""
        picked = rows.tolist()
        return self._map(lambda v: v[rows] if isinstance(v, torch.Tensor) else [v[i] for i in picked])

    def take(self, rows: torch.Tensor) -> Experience:
        """The rows [M] (int64); one fully masked row, which contributes nothing to any loss, if `rows` is empty."""
        if len(rows):
            return self.index(rows)
        blank = self.index(torch.zeros(1, dtype=torch.long))
        masks = {name: getattr(blank, name) for name in ("action_mask", "policy_mask", "value_mask")}
        return blank.with_fields(**{name: torch.zeros_like(m) for name, m in masks.items() if m is not None})

    def to(self, device: torch.device | str) -> Experience:
        """Every tensor on `device`."""
        return self._map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v)

    def with_fields(self, **values: Any) -> Experience:
        """A copy with some fields replaced."""
        return replace(self, **values)

    @staticmethod
    def cat(parts: Sequence[Experience]) -> Experience:
        """Stack rows; step fields are padded on the right to the longest T with their fill value.

        Raises:
            ValueError: no parts, or a field present in some parts only.
        """
        if not parts:
            raise ValueError("there is nothing to stack")
        joined: dict[str, Any] = {}
        for f in fields(Experience):
            values = [getattr(part, f.name) for part in parts]
            present = [v is not None for v in values]
            if any(present) != all(present):
                raise ValueError(f"field '{f.name}' is present in some parts only")
            if not any(present):
                continue
            if isinstance(values[0], list):
                joined[f.name] = [item for value in values for item in value]
            elif isinstance(values[0], dict):
                joined[f.name] = {name: torch.cat([value[name] for value in values]) for name in values[0]}
            elif f.metadata["role"] == "step":
                longest = max(v.shape[1] for v in values)
                joined[f.name] = torch.cat([_pad(v, longest, f.metadata["fill"]) for v in values])
            else:
                joined[f.name] = torch.cat(values)
        return Experience(**joined)


def _pad(value: torch.Tensor, length: int, fill: float | bool) -> torch.Tensor:
    """Right-pad [B, T, ...] to [B, length, ...]."""
    missing = length - value.shape[1]
    inner = (0, 0) * (value.dim() - 2)
    return value if missing == 0 else torch.nn.functional.pad(value, (*inner, 0, missing), value=fill)
