"""GRPO in a plain PyTorch loop: rollouts, advantages and loss are the library's, optimizer and loop are yours."""

# %% A supervised policy that succeeds too rarely; `bash examples/scripts/toy_reach.sh` makes this one.
from pathlib import Path

import torch

import rlvla

POLICY, OUTPUT = "runs/toy/sft/policy", Path("runs/grpo_by_hand/policy")
ITERATIONS, GROUPS, GROUP_SIZE, EPOCHS, BATCH_ROWS = 16, 32, 8, 2, 256
torch.manual_seed(0)

# %%
env = rlvla.EnvConfig().completed(rlvla.recorded_environment(POLICY))
tasks = env.tasks()
states = [rlvla.train_init_states(task) for task in tasks]  # the last fifth is left for evaluations
policy = rlvla.Actor.from_pretrained(POLICY)
optimizer = torch.optim.AdamW(policy.parameters())
sampler = rlvla.TaskSampler(tasks, states, GROUP_SIZE, seed=0)
estimate, policy_loss = rlvla.get_advantage_estimator("grpo"), rlvla.get_policy_loss("ppo")

# %% A group is GROUP_SIZE episodes from the same initial state; what did better than its mean becomes more likely.
with rlvla.EnvPool(num_slots=8, envs_per_worker=4) as pool:
    engine = rlvla.RolloutEngine(pool, env.env_kwargs(), {"success": 1.0}, tasks=tasks)
    for iteration in range(ITERATIONS):
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - iteration / ITERATIONS)
        samples = engine.run(sampler.at(range(iteration * GROUPS, (iteration + 1) * GROUPS)), policy, temperature=1.0)
        scores = torch.tensor([[sample.score] for sample in samples])  # [episodes, 1]
        advantages, _ = estimate(scores, torch.ones_like(scores).bool(), group_ids=[sample.uid for sample in samples])
        rows = rlvla.Experience.from_samples(samples, policy.effective_columns)  # a row per decision
        rows = rows.with_fields(advantages=advantages[rows.episode_index].expand_as(rows.rollout_log_probs))
        for _ in range(EPOCHS):
            for numbers in torch.randperm(len(rows)).split(BATCH_ROWS):
                batch = rows.index(numbers)
                log_probs = policy(wants=("log_probs",), **policy.score(batch, temperature=1.0))["log_probs"]
                loss, _ = policy_loss(log_probs, batch.rollout_log_probs, batch.advantages, batch.policy_mask)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
        print(f"iteration {iteration + 1}: success {scores.mean():.2f}", flush=True)

# %% With its record every command takes the folder, such as cli/eval_vla.py --pretrain.
learned = [rlvla.LearnedStates(task.suite, task.task_id, s.start, s.stop) for task, s in zip(tasks, states)]
OUTPUT.parent.mkdir(parents=True, exist_ok=True)
print(rlvla.write_policy(policy, OUTPUT, rlvla.PolicyRecord(env, tuple(learned))) or f"written: {OUTPUT}")
