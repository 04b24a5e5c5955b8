"""Train an algorithm of Stable-Baselines3 on a task: any library for Gymnasium takes the suites."""

# %% pip install stable-baselines3
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from rlvla import gym_env

STEPS, EPISODES = 40_000, 100

# %% A dict of images, proprioception and the number of the instruction; `init_states` keeps held-out states apart.
training = gym_env("toy_reach", image_size=36, use_proprio=True)
heldout = Monitor(gym_env("toy_reach", image_size=36, use_proprio=True, init_states="heldout"))

# %%
model = PPO("MultiInputPolicy", training, n_steps=1024, batch_size=128, gamma=0.95, seed=0)
for steps in (0, STEPS):
    model.learn(steps, reset_num_timesteps=False) if steps else None
    mean, _ = evaluate_policy(model, heldout, EPISODES)  # the reward of an episode is 1 if it succeeds
    print(f"{steps} steps: {100 * mean:.0f} % of {EPISODES} held-out episodes succeed")
