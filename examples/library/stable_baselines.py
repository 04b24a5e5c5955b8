"""Train Stable-Baselines3's PPO on a suite, and evaluate it on held-out initial states."""

# %%
import gymnasium as gym
import numpy as np
from stable_baselines3 import PPO

from rlvla import gym_env

STEPS, EPISODES = 10_000, 100


# %% The suite's own reward is success, which few random episodes see; the distance to the disc leads there.
class Distance(gym.Wrapper):
    """Pays success, less the distance after each step."""

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        distance = np.linalg.norm(observation["state/target"] - observation["proprio"])
        return observation, reward - float(distance), *rest


def make(states):
    """The task from these initial states; the policy sees two positions and no image."""
    env = gym_env("toy_reach", cameras=["top"], image_size=16, use_proprio=True, use_state=True, init_states=states)
    return gym.wrappers.FilterObservation(Distance(env), ["proprio", "state/target"])


# %%
model = PPO("MultiInputPolicy", make("train"), n_steps=512, batch_size=128, gamma=0.95, learning_rate=1e-3, seed=0)
model.learn(STEPS)

# %%
heldout, successes = make("heldout"), 0
for episode in range(EPISODES):
    (observation, info), over = heldout.reset(seed=episode), False
    while not over:
        action, _ = model.predict(observation, deterministic=True)
        observation, _, terminated, truncated, info = heldout.step(action)
        over = terminated or truncated
    successes += info["is_success"]
print(f"{successes} of {EPISODES} held-out episodes succeed")
