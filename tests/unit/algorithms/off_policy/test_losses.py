"""Losses of critics, actor and temperatures against loops and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from rlvla.algorithms.off_policy import (
    actor_loss,
    critic_actions,
    critic_loss,
    over_primitives,
    parameter_mask,
    parameter_target_entropy,
    primitive_log_probs,
    primitive_target_entropy,
    tanh_normal_sample,
    temperature_loss,
)

M, B, N = 3, 5, 4
SIZES = [3, 0, 2, 1]
ROWS = torch.tensor([True, True, False, True, False])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------------------------------------- critics
def test_the_critic_loss_of_a_loop() -> None:
    q, targets, weights = draw(M, B), draw(B, seed=1), draw(B, seed=2).abs()
    loss, errors = critic_loss(q, targets, weights=weights)
    wanted, distances = 0.0, []
    for b in range(B):
        differences = [float(q[m, b] - targets[b]) for m in range(M)]
        wanted += float(weights[b]) * sum(0.5 * d**2 for d in differences) / M / B
        distances.append(sum(map(abs, differences)) / M)
    assert float(loss) == pytest.approx(wanted) and errors.tolist() == pytest.approx(distances)
    unweighted = critic_loss(q, targets)
    torch.testing.assert_close(unweighted, critic_loss(q, targets, weights=torch.ones_like(weights)))
    torch.testing.assert_close(unweighted[1], errors)


def test_only_the_critics_receive_its_gradient() -> None:
    q, targets, weights = (x.requires_grad_() for x in (draw(M, B), draw(B, seed=1), draw(B, seed=2).abs()))
    loss, errors = critic_loss(q, targets, weights=weights)
    loss.backward()
    torch.testing.assert_close(q.grad, (weights * (q - targets) / (M * B)).detach())
    assert targets.grad is None and weights.grad is None and not errors.requires_grad
    assert gradcheck(lambda x: critic_loss(x, targets, weights=weights)[0], (q,))


# ---------------------------------------------------------------------------------------------------------------- actor
@pytest.mark.parametrize("reduction", ["min", "mean"])
def test_the_actor_loss_sums_over_primitives(reduction: str) -> None:
    q, log_probs, choice = draw(M, B, N), draw(B, N, seed=1), draw(B, N, seed=2).log_softmax(-1)
    loss = actor_loss(q, log_probs, choice, alpha=0.3, alpha_primitives=0.7, reduction=reduction)
    wanted = 0.0
    for b in range(B):
        for k in range(N):
            values = [float(q[m, b, k]) for m in range(M)]
            value = min(values) if reduction == "min" else sum(values) / M
            cost = 0.7 * float(choice[b, k]) + 0.3 * float(log_probs[b, k])
            wanted += math.exp(float(choice[b, k])) * (cost - value) / B
    assert float(loss) == pytest.approx(wanted)


def test_plain_sac_is_the_case_of_one_primitive() -> None:
    q, log_probs = draw(M, B), draw(B, seed=1)
    loss = actor_loss(q, log_probs, alpha=0.3)
    assert float(loss) == pytest.approx(float((0.3 * log_probs - q.min(0).values).mean()))
    choice = primitive_log_probs(draw(B, 1))
    one = actor_loss(q[..., None], log_probs[:, None], choice, alpha=0.3, alpha_primitives=9.0)
    torch.testing.assert_close(one, loss)


def critic(actions: Tensor, which: int) -> Tensor:
    """A smooth critic of rows [..., n + D], with no two alike."""
    return torch.sin(actions @ draw(actions.shape[-1], 2, seed=which)).prod(-1) + 0.3 * which


def loss_of_heads(logits: Tensor, mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    mask = parameter_mask(SIZES)
    x, log_probs = tanh_normal_sample(mean, log_std, noise, mask)
    actions = critic_actions(torch.arange(N).expand(B, N), x, mask)
    q = torch.stack([critic(actions, which) for which in range(M)])
    return actor_loss(q, log_probs.sum(-1), primitive_log_probs(logits), alpha=0.3, alpha_primitives=0.7)


def test_gradients_of_the_heads_are_those_of_finite_differences() -> None:
    logits, mean, log_std = (x.requires_grad_() for x in (draw(B, N), draw(B, N, 3, seed=1), draw(B, N, 3, seed=2)))
    noise, mask = draw(B, N, 3, seed=3), parameter_mask(SIZES)
    assert gradcheck(lambda *heads: loss_of_heads(*heads, noise), (logits, mean, log_std))
    loss = loss_of_heads(logits, mean, log_std, noise)
    loss.backward()
    for parameter in (mean, log_std):
        assert not parameter.grad[:, ~mask].any() and parameter.grad[:, mask].all()
    dirty = [x.masked_fill(~mask, 7.0) for x in (mean, log_std, noise)]
    assert torch.equal(loss_of_heads(logits, *dirty), loss)


def test_the_gradient_of_a_single_choice_is_that_of_its_probability() -> None:
    """The expectation is exact: the derivative by log pi_k is pi_k (cost_k + alpha_primitives)."""
    q, log_probs = draw(M, B, N), draw(B, N, seed=1)
    choice = draw(B, N, seed=2).log_softmax(-1).requires_grad_()
    actor_loss(q, log_probs, choice, alpha=0.3, alpha_primitives=0.7).backward()
    cost = 0.7 * choice + 0.3 * log_probs - q.min(0).values
    torch.testing.assert_close(choice.grad, (choice.exp() * (cost + 0.7) / B).detach())


# --------------------------------------------------------------------------------------------------------- temperatures
@pytest.mark.parametrize(("entropy", "grows"), [(0.2, True), (1.5, False)])
def test_a_temperature_grows_while_the_entropy_is_below_its_target(entropy: float, grows: bool) -> None:
    log_alpha = torch.tensor(math.log(0.01), requires_grad=True)
    entropies = torch.full((B,), entropy, requires_grad=True)
    loss = temperature_loss(log_alpha, entropies, primitive_target_entropy(8))
    assert loss.item() == pytest.approx(math.log(0.01) * (entropy - 0.5 * math.log(8)))
    loss.backward()
    after = (log_alpha - 0.1 * log_alpha.grad).exp()
    assert bool(after > 0.01) == grows and entropies.grad is None
    assert float(log_alpha.grad) == pytest.approx(entropy - 0.5 * math.log(8))


def test_the_target_of_parameters_counts_those_in_use() -> None:
    mask = parameter_mask(SIZES)
    assert parameter_target_entropy(mask).tolist() == [-3, 0, -2, -1]
    assert parameter_target_entropy(mask, 0.5).tolist() == [-1.5, 0, -1, -0.5]
    choice, log_probs = draw(B, N).log_softmax(-1), draw(B, N, seed=1)
    targets = over_primitives(choice, parameter_target_entropy(mask))
    log_alpha = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    temperature_loss(log_alpha, over_primitives(choice, -log_probs), targets).backward()
    gaps = [
        math.exp(float(choice[b, k])) * (-float(log_probs[b, k]) + SIZES[k]) / B for b in range(B) for k in range(N)
    ]
    assert float(log_alpha.grad) == pytest.approx(sum(gaps))
    entropies = -log_probs[:, 0]
    assert gradcheck(lambda x: temperature_loss(x, entropies, targets), (log_alpha,))


# ------------------------------------------------------------------------------------------------------- normalisation
def cases() -> dict:
    """Losses of given rows, as functions of (rows, **options)."""
    q, targets, weights = draw(M, B), draw(B, seed=1), draw(B, seed=2).abs()
    values, log_probs, choice = draw(M, B, N), draw(B, N, seed=3), draw(B, N, seed=4).log_softmax(-1)
    log_alpha = torch.tensor(0.4, dtype=torch.float64)
    alphas = {"alpha": 0.3, "alpha_primitives": 0.7}
    return {
        "critic": lambda r, **o: critic_loss(q[:, r], targets[r], weights=weights[r], **o)[0],
        "actor": lambda r, **o: actor_loss(values[:, r], log_probs[r], choice[r], **alphas, **o),
        "plain": lambda r, **o: actor_loss(q[:, r], targets[r], alpha=0.3, **o),
        "temperature": lambda r, **o: temperature_loss(log_alpha, targets[r], -1.0, **o),
    }


@pytest.mark.parametrize("name", cases())
def test_rows_outside_the_mask_and_the_split_of_a_batch_do_not_matter(name: str) -> None:
    loss = cases()[name]
    kept = ROWS.nonzero()[:, 0]
    torch.testing.assert_close(loss(torch.arange(B), mask=ROWS), loss(kept))
    parts = [loss(rows, num_rows=B, dp_size=2) for rows in torch.arange(B).split([2, 3])]
    torch.testing.assert_close(sum(parts) / 2, loss(torch.arange(B)))


def test_nan_outside_the_mask_reaches_nothing() -> None:
    inputs = [draw(M, B, N), draw(B, N, seed=1), draw(B, N, seed=2).log_softmax(-1)]
    dirty = [x.masked_fill(~ROWS[:, None], math.nan).requires_grad_() for x in inputs]
    loss = actor_loss(*dirty, alpha=0.3, alpha_primitives=0.7, mask=ROWS)
    loss.backward()
    assert loss.isfinite() and all(x.grad.isfinite().all() for x in dirty)
    q, targets, weights = (
        x.masked_fill(~ROWS, math.nan).requires_grad_() for x in (draw(M, B), draw(B), draw(B).abs())
    )
    loss, errors = critic_loss(q, targets, weights=weights, mask=ROWS)
    loss.backward()
    assert loss.isfinite() and q.grad.isfinite().all() and not errors[~ROWS].any() and errors[ROWS].all()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: critic_loss(draw(M, B), draw(B, 1)), r"targets has shape \[5, 1\]"),
        (lambda: critic_loss(draw(M, B), draw(B), weights=draw(1)), r"weights has shape \[1\]"),
        (lambda: critic_loss(draw(M, B), draw(B), mask=torch.ones(B)), "mask must be a bool"),
        (lambda: critic_loss(draw(M, B), draw(B), mask=ROWS[:1]), r"mask has shape \[1\]"),
        (lambda: critic_loss(draw(M, B, 2), draw(B, 2)), "one number per row"),
        (lambda: actor_loss(draw(M, B, N), draw(B, N), alpha=0.1), r"must be \[M, B\] without primitives"),
        (lambda: actor_loss(draw(M, B), draw(B), draw(B), alpha=0.1), r"must be \[M, B, n\] with primitives"),
        (lambda: actor_loss(draw(M, B, N), draw(B, 1), draw(B, N), alpha=0.1), r"log_probs has shape \[5, 1\]"),
        (lambda: temperature_loss(draw(1), draw(B), -1.0), r"log_alpha has shape \[1\]"),
        (lambda: temperature_loss(draw(1)[0], draw(B), draw(1)), r"target_entropy has shape \[1\]"),
    ],
)
def test_arguments_are_checked(call, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()
