"""Try a new reward on episodes that were recorded (or dumped with --dump_rollouts) before training on it."""

# %% A file, or the folder of a run with --dump_rollouts.
import numpy as np

from rlvla import RewardPlan, read_demonstrations, register_reward, score_recorded

EPISODES, MOST = "runs/toy/demos/demos.hdf5", 40


# %%
@register_reward("soon_near")
class SoonNear:
    """Pays once, when the task's proposition `near` first holds; the earlier, the more."""

    def __init__(self, config):
        self.steps, self.paid = 0, False

    def create(self, task, episode):
        return SoonNear(None)

    def step(self, observation, events, info):
        self.steps += 1
        first, self.paid = "near" in events and not self.paid, self.paid or "near" in events
        return 1 / self.steps if first else 0.0

    def finish(self):
        return {}

    def release(self):
        pass


# %% The recorded actions are played again, which recovers every observation and event; no policy is needed.
demos = read_demonstrations(EPISODES)
chosen = range(min(MOST, len(demos.actions)))
scored = score_recorded(EPISODES, demos, chosen, RewardPlan({"soon_near": 1.0}))

# %% Does it tell successes from failures? Half of the pairs would be chance.
totals = np.array([episode.components["soon_near"].sum() for episode in scored])
success = np.array([episode.success_at_end for episode in scored])
pairs = np.sign(totals[success][:, None] - totals[~success])
print(f"{success.sum()} successes are paid {totals[success].mean():.2f}, {(~success).sum()} failures", end=" ")
print(f"{totals[~success].mean():.2f}; a success is paid more in {50 * (1 + pairs.mean()):.0f} % of the pairs")
