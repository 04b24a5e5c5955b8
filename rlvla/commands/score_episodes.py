"""Scoring recorded episodes with any reward configuration; their actions are replayed to observe all propositions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvla.data.demonstrations import Demonstrations
from rlvla.data.replayed_episodes import PlayedEpisode, play_again
from rlvla.experience import Sample
from rlvla.rewards import EpisodeStart, RewardPlan
from rlvla.utils.video import upright

_MOST_FRAMES = 10
_SIDE = 0.6  # steps beside the first and the last one


@dataclass
class ScoredEpisode:
    """The rewards of a recorded episode.

    Attributes:
        name: name of the episode in its file.
        instruction: the language instruction.
        components: reward source -> weighted reward of each step, [T].
        states: state of the reward machine before the first and after each step, [T + 1]; empty without one.
        frames: [T + 1, H, W, 3] uint8, first camera.
        numbers: metrics that the sources report for the episode.
        success_at_end: whether the success predicate held at the end.
    """

    name: str
    instruction: str
    components: dict[str, np.ndarray]
    states: list[str]
    frames: np.ndarray
    numbers: dict[str, float]
    success_at_end: bool

    def as_dict(self) -> dict[str, Any]:
        """Everything but the frames, for JSON."""
        return {
            "episode": self.name,
            "instruction": self.instruction,
            "success_at_end": self.success_at_end,
            "totals": {name: float(reward.sum()) for name, reward in self.components.items()},
            "numbers": {name: float(value) for name, value in self.numbers.items()},
            "machine_states": self.states,
            "rewards": {name: reward.tolist() for name, reward in self.components.items()},
        }


def score_recorded(path: Path, demos: Demonstrations, episodes: Sequence[int], plan: RewardPlan) -> list[ScoredEpisode]:
    """Replay recorded episodes and score them.

    Raises:
        ConfigError: a replay differs from the recording (another version of the simulator).
    """
    scored = []
    for played in play_again(str(path), demos, episodes):
        rewards = plan.begin(played.task, EpisodeStart(played.first, played.init_state_id, played.seed))
        scored.append(_score(f"demo_{played.index}", played, plan, rewards))
    return scored


def _score(name: str, played: PlayedEpisode, plan: RewardPlan, rewards: Any) -> ScoredEpisode:
    first, results = played.first, played.results
    for result in results:
        rewards.look(result)
        rewards.score_chunk(result)
    images, last = torch.from_numpy(np.stack([o.images for o in played.observations])), results[-1]
    terminated = last.terminated or rewards.failed
    rewards.end(terminated=terminated, truncated=last.truncated and not terminated)
    steps, proprio = len(results), None
    if states := [o.proprio for o in played.observations if o.proprio is not None]:
        proprio = torch.from_numpy(np.stack(states))
    sample = Sample(
        images=images[:-1],
        proprio=None if proprio is None else proprio[:-1],
        instruction=first.instruction,
        actions=None,
        executed=torch.ones(steps, 1, dtype=torch.bool),
        trace={},
        log_probs=torch.zeros(steps, 0),
        rewards=torch.zeros(steps, 1),
        reward_components={n: torch.from_numpy(grid) for n, grid in rewards.so_far().components.items()},
        finish_step=steps,
        success_once=any(bool(result.successes.any()) for result in results),
        success_at_end=last.success_at_end,
        terminated=terminated,
        truncated=last.truncated and not terminated,
        last_images=images[-1],
        last_proprio=None if proprio is None else proprio[-1],
        observed_proprio=proprio,
        uid=name,
        suite=played.task.suite,
        task_id=played.task.task_id,
        init_state_id=0,
        seed=0,
    )
    plan.submit(sample)
    paid = rewards.finalize_rewards(plan.collect(1)[0])
    machine_states = rewards.source("rm").states if "rm" in plan.names else []
    rewards.release()
    return ScoredEpisode(
        name=name,
        instruction=first.instruction,
        components={n: grid.flatten() for n, grid in paid.components.items()},
        states=machine_states,
        frames=upright(images[:, 0].numpy(), played.task.images_flipped_vertically),
        numbers=paid.info,
        success_at_end=sample.success_at_end,
    )


def draw_episode(episode: ScoredEpisode, path: Path) -> None:
    """Plot the frames, the state of the reward machine, and each reward component over time with its running sum."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = len(episode.frames) - 1
    shown = np.unique(np.linspace(0, steps, min(_MOST_FRAMES, steps + 1)).round().astype(int))
    rows = bool(episode.states) + len(episode.components)
    figure = plt.figure(figsize=(13, 2.0 + 1.7 * rows), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.6, 1.7 * rows])
    pictures, plots = halves
    for column, step in enumerate(shown):
        axes = pictures.add_subplot(1, len(shown), column + 1)
        axes.imshow(episode.frames[step])
        axes.set_title(f"step {step}", fontsize=9)
        axes.axis("off")
    below = plots.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for axes in below:
        axes.set_xlim(-_SIDE, steps + _SIDE)  # the bars of the first and the last step are whole
        axes.grid(alpha=0.3)
    if episode.states:
        axes, below = below[0], below[1:]
        names = sorted(set(episode.states))
        axes.step(range(steps + 1), [names.index(s) for s in episode.states], where="post", color="#333333")
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.margins(y=0.15)
        axes.set_ylabel("machine", fontsize=9)
    after = np.arange(1, steps + 1)
    for axes, (name, reward) in zip(below, episode.components.items()):
        axes.bar(after, reward, width=0.8, color="#4878a8", label="per step")
        axes.plot(after, reward.cumsum(), color="#d0802a", label="sum so far")
        axes.set_ylabel(name, fontsize=9, parse_math=False)
        axes.margins(y=0.12)
        # Beside the plot, where it covers nothing.
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    plots.axes[-1].set_xlabel("environment step")
    plots.axes[-1].xaxis.get_major_locator().set_params(integer=True)
    result = "success" if episode.success_at_end else "no success"
    figure.suptitle(f"{episode.name}: {episode.instruction} ({result})", fontsize=11, parse_math=False)
    figure.savefig(path, dpi=90)
    plt.close(figure)
