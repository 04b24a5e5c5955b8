"""Train an algorithm of Stable-Baselines3 on a task: any library for Gymnasium takes the suites."""

# %% pip install stable-baselines3
import gymnasium
from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from rlvla import gym_env

STEPS, EPISODES = 8_000, 100


# %% Propositions of the task make a denser reward than success.
class NearToo(gymnasium.Wrapper):
    """Pays a little for each step in which `near` holds."""

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward + 0.02 * info["event/near"], terminated, truncated, info


# %% Without an image encoder: the state of the simulator in place of cameras. Held-out initial states stay apart.
keep = ["proprio", "state/target"]
training, heldout = (
    gymnasium.wrappers.FilterObservation(
        gym_env("toy_reach", use_proprio=True, use_state=True, init_states=split), keep
    )
    for split in ("train", "heldout")
)

# %%
model = SAC("MultiInputPolicy", Monitor(NearToo(training)), gamma=0.95, seed=0)
for steps in (0, STEPS):
    model.learn(steps)
    mean, _ = evaluate_policy(model, Monitor(heldout), EPISODES)  # the reward of an episode is 1 if it succeeds
    print(f"{steps} steps: {100 * mean:.0f} % of {EPISODES} held-out episodes succeed")
