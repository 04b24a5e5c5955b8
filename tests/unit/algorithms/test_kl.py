import math

import pytest
import torch

from rlvla.algorithms.choices import KL_KINDS
from rlvla.algorithms.kl import AdaptiveKLController, FixedKLController, kl_penalty
from tests.support.algorithm_cases import random_batch

ESTIMATES = [kind for kind in KL_KINDS if kind != "full"]


def slow_kl(new, ref, kind):
    d = new - ref
    if kind in ("k1", "kl"):
        return d
    if kind == "abs":
        return abs(d)
    if kind in ("k2", "mse"):
        return d * d / 2
    back = min(max(-d, -20.0), 20.0)
    return min(max(math.exp(back) - back - 1, -10.0), 10.0)


@pytest.mark.parametrize("suffix", ["", "+"])
@pytest.mark.parametrize("kind", ESTIMATES)
def test_equals_the_slow_reference(kind, suffix):
    new = torch.tensor([[-0.1, -2.0, -31.0, -0.5, -9.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.0, -0.4, -0.5, -31.0, -9.0]], dtype=torch.float64)
    kl = kl_penalty(new, ref, kind + suffix)
    wanted = [slow_kl(n, r, kind) for n, r in zip(new.tolist()[0], ref.tolist()[0])]
    torch.testing.assert_close(kl.detach()[0], torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-13)
    if suffix:
        kl.sum().backward()
        torch.testing.assert_close(new.grad, (new - ref).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_k3_pulls_back_tokens_beyond_its_clamp(kind, dtype):
    below = [-2.6, -1.0, -1e-4, 0.0, 1e-4, 1.0, 10.9]
    beyond = [-100.0, -20.5, -15.0, -2.7, 11.1, 15.0, 20.5, 100.0]
    log_ratio = torch.tensor([below + beyond], dtype=dtype, requires_grad=True)
    kl = kl_penalty(log_ratio, torch.zeros_like(log_ratio), kind)
    kl.sum().backward()
    unclamped = torch.expm1(-log_ratio.detach()) + log_ratio.detach()
    assert torch.equal(kl[0, : len(below)], unclamped[0, : len(below)]), "to the bit"
    assert (kl[0, len(below) :] == 10.0).all()
    slow = [1.0 - math.exp(min(-d, 20.0)) for d in log_ratio.tolist()[0]]
    torch.testing.assert_close(log_ratio.grad[0], torch.tensor(slow, dtype=dtype), rtol=1e-6, atol=1e-7)


def test_gradient_descent_on_k3_brings_a_drifted_token_back():
    for start in (-8.0, 14.0):
        log_ratio = torch.tensor([[start]], requires_grad=True)
        optimizer = torch.optim.Adam([log_ratio], lr=0.1)
        for _ in range(400):
            optimizer.zero_grad()
            kl_penalty(log_ratio, torch.zeros(1, 1), "k3").sum().backward()
            torch.nn.utils.clip_grad_norm_([log_ratio], 1.0)
            optimizer.step()
        assert abs(log_ratio.item()) < 0.1, start


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "full"])
def test_gradcheck(kind):
    torch.manual_seed(0)
    shape = (2, 3, 4) if kind == "full" else (2, 3)
    new = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(shape, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, kind), (new,))


def test_full_is_the_exact_divergence():
    torch.manual_seed(1)
    logits, ref = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    logits[0, 0, 2] = -math.inf  # an impossible action contributes nothing
    p, q = torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(logits=ref)
    kl = kl_penalty(logits + 3.0, ref - 1.0, "full")
    torch.testing.assert_close(kl[0, 1:], torch.distributions.kl_divergence(p, q)[0, 1:])
    probs = logits[0, 0].softmax(-1)
    by_hand = sum(a * (a / b).log() for a, b in zip(probs, ref[0, 0].softmax(-1)) if a > 0)
    torch.testing.assert_close(kl[0, 0], by_hand)


def test_estimates_agree_with_the_exact_divergence_on_average():
    torch.manual_seed(2)
    logits, ref = torch.randn(1, 1, 5, dtype=torch.float64), torch.randn(1, 1, 5, dtype=torch.float64)
    new, old = logits.log_softmax(-1)[0, 0], ref.log_softmax(-1)[0, 0]
    exact = kl_penalty(logits, ref, "full")[0, 0]
    for kind in ("k1", "k3"):
        torch.testing.assert_close((new.exp() * kl_penalty(new[None], old[None], kind)[0]).sum(), exact)


def test_small_differences_keep_their_digits_in_float32():
    new, ref = torch.tensor([[-1.0]]), torch.tensor([[-1.0 + 1e-4]])
    assert float(kl_penalty(new, ref, "k3")) == pytest.approx(float((ref - new) ** 2) / 2, rel=1e-2)


@pytest.mark.parametrize("kind", ["k1", "k2+", "k3", "k3+", "abs", "full"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_mask_keeps_padding_out_of_value_and_gradient(kind, garbage):
    b = random_batch(3, garbage=garbage)
    new, ref = b["new"], b["old"]
    if kind == "full":
        new, ref = (torch.stack([x, 2 * x], -1) for x in (new, ref))
    new = new.requires_grad_()
    kl = kl_penalty(new, ref, kind, b["mask"])
    kl.sum().backward()
    assert (kl[~b["mask"]] == 0).all()
    assert (new.grad[~b["mask"]] == 0).all()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize(("new", "ref"), [(-math.inf, -1.0), (-1.0, -math.inf), (-3e38, -1.0)])
def test_k3_of_an_impossible_token_is_finite(new, ref):
    new, ref = torch.tensor([[new]], requires_grad=True), torch.tensor([[ref]])
    kl = kl_penalty(new, ref, "k3")
    kl.sum().backward()
    assert float(kl) == 10.0 and new.grad.isfinite().all()


def test_bfloat16_is_computed_in_float32():
    new, ref = torch.full((1, 1), -1.0, dtype=torch.bfloat16), torch.full((1, 1), -1.0078125, dtype=torch.bfloat16)
    kl = kl_penalty(new, ref, "k2")
    assert kl.dtype == torch.float32
    assert float(kl) == 0.5 * 0.0078125**2


def test_bad_input():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="unknown KL kind 'k4'.*k1"):
        kl_penalty(x, x, "k4")
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 2\]"):
        kl_penalty(x, x[:, :2], "k1")
    with pytest.raises(ValueError, match=r"full\+"):
        kl_penalty(x, x, "full+")
    with pytest.raises(ValueError, match="vocabulary"):
        kl_penalty(x[0], x[0], "full")
    with pytest.raises(ValueError, match="bool"):
        kl_penalty(x, x, "k1", x)


def test_controllers():
    fixed = FixedKLController(0.3)
    fixed.update(100.0, 5)
    assert fixed.value == 0.3
    adaptive = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    adaptive.update(9.0, 100)
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    adaptive.update(5.7, 100)
    assert adaptive.value == pytest.approx(0.2 * 1.02 * (1 - 0.05 * 0.1))
    resumed = AdaptiveKLController(0.9, target=6.0, horizon=1000)
    resumed.load_state_dict(adaptive.state_dict())
    adaptive.update(1.0, 10)
    resumed.update(1.0, 10)
    assert resumed.value == adaptive.value
    adaptive.update(math.nan, 10)
    assert adaptive.value == resumed.value, "what was not measured steers nothing"
    for wrong in (lambda: FixedKLController(-0.1), lambda: FixedKLController(math.nan)):
        with pytest.raises(ValueError, match="init_kl_coef"):
            wrong()
    with pytest.raises(ValueError, match="target and horizon"):
        AdaptiveKLController(0.1, target=0.0, horizon=10)
