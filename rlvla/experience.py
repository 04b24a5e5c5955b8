"""The two data types that travel from the simulator to the update.

S = decisions (chunks) of an episode, A = actions per chunk, D = action dimensions, T = A * D tokens, N = cameras,
P = proprio dimensions, B = rows (decisions) of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch


@dataclass
class Sample:
    """One finished episode.

    Attributes:
        images: [S, N, H, W, 3] uint8, what the policy saw at each decision.
        proprio: [S, P] float32, or None.
        instruction: the language command.
        action_tokens: [S, T] int64, columns 0..255 of the action vocabulary, order (action index, dim).
        rollout_log_probs: [S, T] float32, at sampling time and at the sampling temperature.
        rewards: [S, A] float32 per executed env step, the sum of the reward sources.
        reward_components: each source on its own, name -> [S, A].
        action_mask: [S, T] bool, True for tokens of actions that were really executed.
        finish_step: environment steps executed.
        success_once: the success predicate held at some step.
        success_at_end: success was held (long enough) when the episode ended.
        regressions: how often the success predicate held and was lost again.
        terminated: the episode ended by itself; its value is not bootstrapped.
        truncated: the step limit was reached; its last value is bootstrapped.
        last_images, last_proprio: the observation after the last action, for that bootstrap.
        frames: [F, H, W, 3] uint8 after each executed step, where they were asked for.
        trace: per executed step the propositions that held and whether success did, kept beside frames.
        told: S + 1 strings, the instruction as the policy was told it at each decision and after the last action, where
            that is more than `instruction`.
        state_width: so many of the last entries of `proprio` tell the state of a reward machine.
        reward_info: numbers that reward sources say of the episode, e.g. how often a machine fell back.
        uid: the group: episodes of one uid started from the same task instance.
        suite, task_id, init_state_id, seed: where the episode came from.
        rows_from_below: see `TaskSpec`.
    """

    images: torch.Tensor
    proprio: torch.Tensor | None
    instruction: str
    action_tokens: torch.Tensor
    rollout_log_probs: torch.Tensor
    rewards: torch.Tensor
    reward_components: dict[str, torch.Tensor]
    action_mask: torch.Tensor
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
    frames: Any = None
    reward_info: dict[str, float] = field(default_factory=dict)
    regressions: int = 0
    trace: list[tuple[frozenset[str], bool]] | None = None
    told: list[str] | None = None
    state_width: int = 0
    rows_from_below: bool = False

    @property
    def env_proprio(self) -> torch.Tensor | None:
        """`proprio` as the environment gave it."""
        return self.proprio[:, : self.proprio.shape[1] - self.state_width] if self.proprio is not None else None

    @property
    def decision_instructions(self) -> list[str]:
        """S strings: what the policy was told at each decision."""
        return [self.instruction] * self.num_decisions if self.told is None else self.told[:-1]

    @property
    def last_instruction(self) -> str:
        """What it would have been told after the last action."""
        return self.instruction if self.told is None else self.told[-1]

    @property
    def num_decisions(self) -> int:
        """S."""
        return self.images.shape[0]

    @property
    def score(self) -> float:
        """Episode reward: the sum over executed steps."""
        return float(self.rewards.sum())


def _step(fill: float | bool = 0) -> Any:
    """A [B, T] field; `fill` is what padding along T holds."""
    return field(default=None, metadata={"role": "step", "fill": fill})


def _episode() -> Any:
    """A [B, ...] field: one entry per row, never padded."""
    return field(default=None, metadata={"role": "episode"})


@dataclass
class Experience:
    """A batch of decisions, ready for an update. Every field is tagged "step" [B, T, ...] or "episode" [B, ...].

    Stacking, padding, indexing and moving between devices follow the tag; a new field is declared once, here.
    Absent fields are None.

    Attributes:
        images: [B, N, H, W, 3] uint8.
        proprio: [B, P] float32.
        instructions: B strings.
        episode_index: [B] int64, which episode of the rollout a row belongs to.
        action_tokens: [B, T] int64.
        action_mask: [B, T] bool.
        policy_mask: [B, T] bool, the tokens whose log-probs are trained: those of `action_mask` that can change what
            the environment executes.
        value_mask: [B, T] bool, tokens at which the critic is asked and trained.
        old_log_probs: [B, T] of the actor before the update.
        rollout_log_probs: [B, T] at sampling time.
        ref_log_probs: [B, T] of the reference model.
        ref_all_log_probs: [B, T, 256] of the reference model for every action id, where the exact KL is a loss.
        rollout_weights: [B, T] factors on the policy loss that correct for the gap between rollout and training.
        values: [B, T] of the critic before the update.
        advantages: [B, T].
        returns: [B, T].
    """

    images: torch.Tensor = _episode()
    proprio: torch.Tensor | None = _episode()
    instructions: list[str] = _episode()
    episode_index: torch.Tensor = _episode()
    action_tokens: torch.Tensor = _step()
    action_mask: torch.Tensor = _step(False)
    policy_mask: torch.Tensor = _step(False)
    value_mask: torch.Tensor = _step(False)
    old_log_probs: torch.Tensor = _step()
    rollout_log_probs: torch.Tensor = _step()
    ref_log_probs: torch.Tensor | None = _step()
    ref_all_log_probs: torch.Tensor | None = _step()
    rollout_weights: torch.Tensor | None = _step()
    values: torch.Tensor | None = _step()
    advantages: torch.Tensor = _step()
    returns: torch.Tensor = _step()

    def __len__(self) -> int:
        """B."""
        return len(self.instructions)

    def _map(self, transform: Any) -> Experience:
        changed = {f.name: transform(f, getattr(self, f.name)) for f in fields(self)}
        return Experience(**{name: value for name, value in changed.items() if value is not None})

    def index(self, rows: torch.Tensor) -> Experience:
        """The rows [M] (int64) in that order."""
        picked = rows.tolist()
        return self._map(
            lambda f, v: v[rows] if isinstance(v, torch.Tensor) else None if v is None else [v[i] for i in picked]
        )

    def to(self, device: torch.device | str) -> Experience:
        """Every tensor on `device`."""
        return self._map(lambda f, v: v.to(device) if isinstance(v, torch.Tensor) else v)

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
