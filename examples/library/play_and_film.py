"""Play a policy, and film the episodes."""

# %% A policy folder; `bash examples/scripts/toy_reach.sh` makes this one in a minute and a half.
from pathlib import Path

from rlvla import Actor, EnvConfig, EnvPool, EpisodeRequest, RolloutEngine, captioned, recorded_environment, write_mp4

POLICY, OUTPUT, EPISODES = "runs/toy/ppo/policy", Path("runs/films"), 4

# %% The folder records the environment that its policy knows: suite, cameras, image size.
env = EnvConfig().completed(recorded_environment(POLICY))
task = env.tasks()[0]
policy = Actor.from_pretrained(POLICY)

# %% Worker processes simulate; the policy is asked for a batch of decisions whenever some of them wait for one.
requests = [EpisodeRequest(task.suite, task.task_id, state, 0, "film", record_frames=True) for state in range(EPISODES)]
with EnvPool(num_slots=2) as pool:
    engine = RolloutEngine(pool, env.env_kwargs(), {"success": 1.0}, tasks=[task])
    samples = engine.run(requests, policy, temperature=1.0, greedy=True)

# %% A `Sample` is an episode: observations, actions, log-probs, rewards, and here the frame of every step.
OUTPUT.mkdir(parents=True, exist_ok=True)
for sample in samples:
    path = OUTPUT / f"state{sample.init_state_id}.mp4"
    write_mp4(path, captioned(sample), task.control_freq)
    print(f"{path}: {sample.instruction}, {sample.finish_step} steps, success {sample.success_at_end}")
