"""What an update of SAC computes from a batch, against slow formulas, row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from cli.train_sac_vla import build_parser
from rlvla.commands.off_policy.flags import SACRun
from rlvla.commands.off_policy.train import run_sac
from rlvla.commands.runs.flags import flags_of
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.off_policy.memory import Batch, Observations
from rlvla.trainer.off_policy.sac import CHOICE, PARAMETERS, SAC
from rlvla.utils.errors import TrainingHalted
from tests.support.robosuite_reference import require_simulator

COMMON = [
    *("--num_envs", "1", "--deterministic_rollout", "--hidden_sizes", "16", "--train_batch_size", "12"),
    *("--rollout_batch_size", "2", "--random_episodes", "2", "--num_episodes", "4", "--no-val_before_train"),
    *("--eval_episodes", "1", "--no-use_tensorboard", "--n_critics", "3", "--target_critics", "2"),
    *("--replay_priority", "td", "--gamma", "0.9", "--init_temperature", "0.3"),
]
REACH = ["--custom_module", "tests/support/state_reach.py", "--task_suite_name", "state_reach"]
REACH += ["--action_chunk_len", "3", "--n_step", "2"]
LIFT = ["--task_suite_name", "robosuite", "--task_ids", "0", "--control_freq", "10", "--object_state"]
LIFT += ["--action_space", "primitives", "--policy", "primitives", "--primitives", "reach", "grasp", "open"]
LIFT += ["--max_steps", "30"]
CASES = {
    "plain": REACH,
    "plain, mean, no entropy": [*REACH, "--actor_reduction", "mean", "--no-entropy_in_target"],
    # Rewards in every step, so that returns recorded over fewer decisions differ.
    "conservative": [
        *REACH,
        "--cql_coef",
        "0.6",
        "--cql_actions",
        "2",
        "--reward",
        "rm:1",
        "--rm_state_input",
        "proprio",
    ]
    + ["--rm_formula", "X X X X F reached"],
    "flow": [*REACH, "--policy", "flow", "--flow_steps", "3", "--flow_matching_coef", "0.7"],
    "primitives": LIFT,
    "primitives, uniform choice": [*LIFT, "--choice_exploration", "100", "--actor_reduction", "mean"],
}


@pytest.fixture(scope="module", params=CASES)
def learner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SAC:
    """A learner after a few updates, whose networks are no longer those of the start."""
    if "primitives" in request.param:
        require_simulator()
    argv = [*COMMON, *CASES[request.param], "--save_path", str(tmp_path_factory.mktemp("sac") / "run")]
    with flags_of(SACRun, build_parser, argv) as flags:
        trainer = run_sac(flags)
    assert trainer is not None and isinstance(trainer.algorithm, SAC) and trainer.algorithm.updates
    temperatures = trainer.algorithm.temperatures
    temperatures._log.copy_(torch.tensor([0.3, 0.2]).log()[: len(temperatures.values())])
    return trainer.algorithm


def copy_of(generator: torch.Generator) -> torch.Generator:
    """A generator that is going to draw the same."""
    return torch.Generator().set_state(generator.get_state())


class Row:
    """What the policy does with one observation: parameters and log-density of each primitive, log-probs of the choice.

    Args:
        learner: the learner.
        seen: a batch of observations.
        index: of the row in it.
        noise: [n, W] of this row.
    """

    def __init__(self, learner: SAC, seen: Observations, index: int, noise: Tensor):
        policy = learner._policy
        self.proprio = seen.proprio[index : index + 1]
        features = policy.encoder(policy.policy_proprio(self.proprio), None, None)
        if policy.matching_noise:
            width = policy.config.parameters
            u, steps, noise = noise[:, :width], policy.config.flow_steps, noise[:, width:]
            for step in range(steps):
                time = torch.tensor([[1.0 - step / steps]])
                both = policy.network.velocity_of(torch.cat([features, u, time], 1))
                u, log_std = u - both[:, :width] / steps, both[None, :, width:]
            mean = u[None]
        else:
            mean, log_std = policy.network.parameter_distribution(features)
        raw = mean[0] + log_std[0].exp() * noise
        self.parameters, used = raw.tanh(), policy.parameter_mask
        density = TransformedDistribution(Normal(mean[0], log_std[0].exp()), [TanhTransform(cache_size=0)])
        inside = self.parameters.clamp(-1 + 1e-7, 1 - 1e-7)
        self.log_density = [density.log_prob(inside)[k][used[k]].sum() for k in range(len(used))]
        self.choice = None
        if policy.network.choice is not None:
            self.choice = policy.network.choice(features)[0].clamp(-10, 10).log_softmax(-1)
        self.decisions = []  # as critics read them
        for kind in range(len(used)):
            values = self.parameters[kind] * used[kind]
            one_hot = torch.eye(len(used))[kind] if self.choice is not None else torch.zeros(0)
            self.decisions.append(torch.cat([one_hot, values]))

    def q_values(self, critic: Any, kind: int) -> Tensor:
        """[M] of the decision for one primitive."""
        return critic(self.decisions[kind][None], self.proprio, None, None)[:, 0]


def rows_of(learner: SAC, seen: Observations, noise: torch.Generator) -> list[Row]:
    policy = learner._policy
    drawn = torch.randn(len(seen.proprio), len(policy.parameter_mask), policy.noise_width, generator=noise)
    return [Row(learner, seen, index, drawn[index]) for index in range(len(seen.proprio))]


def test_targets_are_soft_values_of_what_the_policy_would_do(learner: SAC) -> None:
    _, batch = learner._draw()
    noise, subsets = copy_of(learner._noise), copy_of(learner._shared_noise)
    found = learner._targets(batch, learner._shared_noise)
    with torch.no_grad():
        rows = rows_of(learner, batch.later, noise)
        alpha, critics = learner.temperatures[PARAMETERS], torch.randperm(3, generator=subsets)[:2]
        at = torch.rand(len(rows), generator=noise) if rows[0].choice is not None else None
        for index, row in enumerate(rows):
            kind, of_choice = 0, 0.0
            if row.choice is not None:
                kind = int((row.choice.exp().cumsum(0) <= at[index]).sum())
                of_choice = learner.temperatures[CHOICE] * float(row.choice[kind])
            value = min(row.q_values(learner._target, kind)[critics].tolist())
            if learner._sac.entropy_in_target:
                value -= alpha * float(row.log_density[kind]) + of_choice
            wanted = float(batch.returns[index]) + float(batch.discounts[index]) * value
            assert float(found[index]) == pytest.approx(wanted, rel=2e-3, abs=2e-3)
    assert len({round(float(discount), 6) for discount in batch.discounts}) > 1, "some bootstrap, some do not"


def test_critics_step_on_the_weighted_error_of_all_of_them(learner: SAC, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, batch = learner._draw()
    batch.weights[:] = torch.linspace(0.1, 1.0, len(batch.weights))
    noise, subsets = copy_of(learner._noise), copy_of(learner._shared_noise)
    targets = learner._targets(batch, learner._shared_noise)
    penalties = conservative_penalties(learner, batch, drawn.rows, copy_of(learner._noise))
    learner._noise.set_state(noise.get_state())
    learner._shared_noise.set_state(subsets.get_state())
    steps = caught(learner.critic, monkeypatch)
    errors = learner._update_critics(batch, Metrics())
    critic, total = learner.critic.module, torch.zeros(())
    for index in range(len(targets)):
        q = critic(batch.actions[index : index + 1], batch.now.proprio[index : index + 1], None, None)[:, 0]
        gaps = q - targets[index]
        assert errors[index] == pytest.approx(float(gaps.detach().abs().mean()), rel=1e-4, abs=1e-6)
        total = total + batch.weights[index] * (gaps**2 / 2).mean() / len(targets)
    total = total + 0.6 * sum(penalties) / len(targets)
    check_step(steps, total, list(critic.parameters()))


def conservative_penalties(learner: SAC, batch: Batch, rows: Any, noise: torch.Generator) -> list[Tensor]:
    """Cal-QL's penalty of each row, with two uniform decisions and two of the policy; [] where it is off."""
    if not learner._sac.cql_coef:
        return []
    count, width, gamma, buffer = 2, learner._policy.config.parameters, 0.9, learner.memory.buffer
    uniform = 2 * torch.rand(len(rows), count, width, generator=noise) - 1
    samples = [rows_of(learner, batch.now, noise) for _ in range(count)]
    critic, penalties, raised = learner.critic.module, [], 0
    for index, row in enumerate(rows):
        recorded, discount, at = 0.0, 1.0, int(row)
        while buffer.drawable[at]:  # to the end of the episode, decision by decision
            ahead = buffer.n_step([at], 1, gamma)
            recorded += discount * float(ahead.returns[0])
            discount, at = discount * gamma ** int(buffer.gather([at], ["steps"])["steps"][0]), int(ahead.next_rows[0])
        assert float(batch.recorded_returns[index]) == pytest.approx(recorded, rel=1e-5, abs=1e-6)
        one = slice(index, index + 1)
        terms = []
        for decision in uniform[index]:
            value = critic(decision[None], batch.now.proprio[one], None, None)[:, 0]
            terms.append(value + width * math.log(2))
        for sample in samples:
            value = sample[index].q_values(critic, 0)
            raised += int((value < recorded).sum())
            terms.append(value.clamp_min(recorded) - sample[index].log_density[0].detach())
        stored = critic(batch.actions[one], batch.now.proprio[one], None, None)[:, 0]
        penalties.append((torch.stack(terms).exp().mean(0).log() - stored).mean())
    assert 0 < raised < 3 * count * len(rows), "some values are below the recorded return, some are not"
    return penalties


def matching_losses(learner: SAC, batch: Batch, noise: torch.Generator) -> list[Tensor]:
    """Squared error of a flow's velocity for each row, at a random point between noise and the stored decision."""
    policy = learner._policy
    (length, dims), width = (policy.config.action_chunk_len, policy.config.action_dim), policy.config.parameters
    drawn, losses = torch.randn(len(batch.actions), width + 1, generator=noise), []
    for index, numbers in enumerate(drawn):
        time = 0.999 * Normal(0, 1).cdf(numbers[-1]) ** (2 / 3) + 0.001
        action = batch.actions[index].clamp(-0.99, 0.99).atanh()
        proprio = policy.policy_proprio(batch.now.proprio[index : index + 1])
        point = time * numbers[:-1] + (1 - time) * action
        inputs = torch.cat([policy.encoder(proprio, None, None)[0], point, time[None]])
        velocity = policy.network.velocity_of(inputs[None])[0, :width]
        error = (velocity - (numbers[:-1] - action)).view(length, dims)
        losses.append((error[: int(batch.steps[index])] ** 2).mean())
    return losses


@pytest.mark.parametrize("demonstrated", [False, True])
def test_the_actor_descends_the_entropy_less_the_value(
    learner: SAC, demonstrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched = bool(learner._policy.matching_noise)
    if demonstrated and not matched:
        pytest.skip("its loss is the same with demonstrations")
    _, batch = learner._draw()
    batch.steps[:4] = torch.tensor([1, 2, 1, 2])
    if demonstrated:
        batch.demonstrated[::2] = True
        monkeypatch.setattr(learner, "_demos", learner.memory)
    noise, steps = copy_of(learner._noise), caught(learner.actor, monkeypatch)
    gaps: list[dict[str, float]] = []
    monkeypatch.setattr(learner.temperatures, "step", gaps.append)
    learner._update_actor(batch, Metrics())
    assert all(p.grad is None or not p.grad.any() for p in learner._target.parameters())
    matching = matching_losses(learner, batch, noise) if matched else []
    rows, critic = rows_of(learner, batch.now, noise), learner.critic.module
    alpha, reduce = learner.temperatures[PARAMETERS], learner._sac.actor_reduction
    loss, of_entropy, of_choice = torch.zeros(()), 0.0, 0.0
    chosen: list[bool] = []
    sizes = learner._policy.parameter_mask.sum(-1).tolist()
    for index, row in enumerate(rows):
        q = [row.q_values(critic, kind) for kind in range(len(sizes))]
        values = [part.min() if reduce == "min" else part.mean() for part in q]
        costs = [alpha * density - value for density, value in zip(row.log_density, values)]
        if row.choice is None:
            loss = loss + costs[0]
            of_entropy += -float(row.log_density[0]) + sizes[0]
            if matched:
                one = slice(index, index + 1)
                stored = critic(batch.actions[one], row.proprio, None, None)[:, 0].min()
                imitated = bool(batch.demonstrated[index]) if demonstrated else bool(stored > values[0])
                loss, chosen = loss + 0.7 * imitated * matching[index], [*chosen, imitated]
            continue
        tempered = learner.temperatures[CHOICE]
        shares, n = row.choice.exp(), len(sizes)
        if learner._episodes < learner._sac.choice_exploration:
            loss = loss + sum((cost - tempered * math.log(n)) / n for cost in costs)
            costs = [cost.detach() for cost in costs]
        loss = loss + sum(p * (tempered * log_p + cost) for p, log_p, cost in zip(shares, row.choice, costs))
        of_entropy += sum(float(p) * (size - float(d)) for p, size, d in zip(shares, sizes, row.log_density))
        of_choice += -float((shares * row.choice).sum()) - 0.5 * math.log(n)
    assert len(set(chosen)) == (2 if matched else 0), "some rows are imitated, some are not"
    check_step(steps, loss / len(rows), list(learner._policy.parameters()))
    (found,) = gaps
    assert found[PARAMETERS] == pytest.approx(of_entropy / len(rows), rel=1e-3, abs=1e-3)
    if rows[0].choice is not None:
        assert found[CHOICE] == pytest.approx(of_choice / len(rows), rel=1e-3, abs=1e-4)


def test_a_step_of_the_actor_leaves_the_critics_alone(learner: SAC) -> None:
    _, batch = learner._draw()
    networks = [learner.actor.module, learner.critic.module, learner._target]
    before = [[value.clone() for value in network.parameters()] for network in networks]
    learner._update_actor(batch, Metrics())
    moved = [any(not torch.equal(*p) for p in zip(old, new.parameters())) for old, new in zip(before, networks)]
    assert moved == [True, False, False]
    assert all(p.requires_grad and (p.grad is None or not p.grad.any()) for p in learner.critic.module.parameters())


def test_an_update_moves_target_and_priorities(learner: SAC, monkeypatch: pytest.MonkeyPatch) -> None:
    updates, drawn, errors = learner.updates, [], []
    learner.pending_updates = 1.5
    draw, step = learner._draw, learner._update_critics
    monkeypatch.setattr(learner, "_draw", lambda: drawn.append(draw()) or drawn[-1])
    monkeypatch.setattr(learner, "_update_critics", lambda *a: errors.append(step(*a)) or errors[-1])
    before = [value.clone() for value in learner._target.parameters()]
    learner.update(Metrics())
    assert learner.updates == updates + 1 and learner.pending_updates == 0.5
    tau = learner._sac.tau
    for old, new, source in zip(before, learner._target.parameters(), learner.critic.module.parameters()):
        assert torch.allclose(new, (1 - tau) * old + tau * source, atol=1e-7)
    assert any(not torch.equal(old, new) for old, new in zip(before, learner._target.parameters()))
    ((rows, _),) = drawn
    stored = learner.memory.buffer.gather(rows.rows, ["td_error"])["td_error"]
    last = dict(zip(rows.rows.tolist(), errors[0]))  # a row that was drawn twice has the same error twice
    assert stored == pytest.approx([last[row] for row in rows.rows.tolist()], rel=1e-5)


@pytest.mark.parametrize("model", ["critic", "actor"])
def test_steps_that_are_no_numbers_end_the_run_if_they_do_not_stop(
    learner: SAC, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, batch = learner._draw()
    norms = iter([math.nan, 1.0, *[math.inf] * learner.config.guards.max_bad_steps])
    monkeypatch.setattr(getattr(learner, model), "backward", lambda loss, last: next(norms))
    update = learner._update_critics if model == "critic" else learner._update_actor
    for _ in range(1 + learner.config.guards.max_bad_steps):
        update(batch, Metrics())
    with pytest.raises(TrainingHalted, match=f"updates of the {model} in a row"):
        update(batch, Metrics())
    assert not list(norms), "a step in between that is finite begins the count anew"
    learner._bad_steps[model] = 0


def caught(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, list[Tensor | None]]]:
    """Losses and gradients of the steps of an engine, which are not taken."""
    steps: list[tuple[Tensor, list[Tensor | None]]] = []
    parameters = [p for p in engine.module.parameters() if p.requires_grad]

    def backward(loss: Tensor, last: bool) -> float:
        steps.append((loss.detach(), list(torch.autograd.grad(loss, parameters, allow_unused=True))))
        return 1.0

    monkeypatch.setattr(engine, "backward", backward)
    return steps


def check_step(steps: list[tuple[Tensor, list[Tensor | None]]], loss: Tensor, parameters: list[Tensor]) -> None:
    """The only step was on this loss, with its gradient."""
    ((found, gradients),) = steps
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-4)
    for gradient, wanted in zip(gradients, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        assert (gradient is None) == (wanted is None)
        if gradient is not None and wanted is not None:
            assert torch.allclose(gradient, wanted, rtol=5e-3, atol=1e-3 * float(wanted.abs().max()) + 1e-6)
    assert any(gradient is not None and gradient.any() for gradient in gradients)
