"""Evaluate anyone's policy by the protocol: held-out initial states, the same for every policy, with intervals."""

# %%
import numpy as np

from rlvla import Decision, EnvConfig, EnvPool, PolicySpec, RolloutEngine, evaluate

EPISODES = 100
COLORS = {"red": (214, 39, 40), "green": (44, 160, 60), "blue": (40, 80, 220)}


# %% Any object with `spec`, `prepare` and `act` will do (`rlvla.RolloutPolicy`); this one needs no network.
class LooksForColor:
    """Moves toward the middle of the pixels that have the color in the instruction; two actions per decision."""

    spec = PolicySpec(action_chunk_len=2, action_dim=2, columns=2, noise_shape=(0,))

    def prepare(self, images, proprio):
        return images, proprio

    def act(self, images, proprio, instructions, *, noise, temperature, greedy=False):
        actions = np.zeros((len(images), 2, 2), np.float32)
        for row, (picture, place, words) in enumerate(zip(images[:, 0], proprio, instructions)):
            color = next(value for name, value in COLORS.items() if name in words)
            y, x = np.argwhere(np.abs(picture.astype(int) - color).sum(-1) < 60).mean(0) / len(picture) * 2 - 1
            actions[row] = np.clip(2 * (np.array([x, -y]) - place), -1, 1)
        return Decision(actions, np.zeros((len(images), 2), np.float32), trace={})


# %%
env = EnvConfig(task_suite_name="toy_reach", image_size=64, use_proprio=True)
with EnvPool(num_slots=8, envs_per_worker=4) as pool:
    engine = RolloutEngine(pool, env.env_kwargs(), {"success": 1.0})
    result = evaluate(engine, LooksForColor(), env.tasks(), episodes_per_task=EPISODES)
print(result.as_table())
