import pytest
import torch
from algorithm_cases import random_batch

from rlvla.algorithms.rewards import add_kl_penalty, assemble_rewards, token_mask

FINISH = torch.tensor([1, 3, 4])
DIM, TOKENS = 2, 8


def test_token_mask_ends_with_the_last_executed_step():
    assert token_mask(FINISH, TOKENS, DIM).int().tolist() == [
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert not token_mask(torch.tensor([0]), TOKENS, DIM).any()


def test_success_inside_a_chunk_lands_on_the_last_executed_token():
    """Episode 1 ends at step 3, in the middle of its second chunk of two actions."""
    rewards = assemble_rewards(FINISH, TOKENS, DIM, scores=torch.tensor([0.0, 1.0, 2.0]))
    assert rewards.nonzero().tolist() == [[1, 5], [2, 7]]
    assert torch.equal(rewards.sum(-1), torch.tensor([0.0, 1.0, 2.0]))


def test_dense_rewards_sit_on_the_last_token_of_their_action():
    steps = torch.tensor([[0.5, torch.nan, 9.0, 9.0], [1.0, 2.0, 3.0, torch.inf], [1.0, 1.0, 1.0, 1.0]])
    rewards = assemble_rewards(FINISH, TOKENS, DIM, step_rewards=steps, scores=torch.tensor([0.0, 10.0, 0.0]))
    assert rewards.tolist() == [
        [0, 0.5, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 2, 0, 13, 0, 0],
        [0, 1, 0, 1, 0, 1, 0, 1],
    ]


def test_scores_are_clipped_before_they_are_placed():
    rewards = assemble_rewards(FINISH, TOKENS, DIM, scores=torch.tensor([-3.0, 0.5, 7.0]), score_range=(-1.0, 1.0))
    assert rewards.sum(-1).tolist() == [-1.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="score_range"):
        assemble_rewards(FINISH, TOKENS, DIM, scores=torch.zeros(3), score_range=(1.0, -1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"finish_step": torch.tensor([1, 0, 4])}, "at least one executed step"),
     ({"finish_step": torch.tensor([1, 3, 5])}, r"\[1, 5\].*0 to 4 steps"),
     ({"finish_step": torch.tensor([1.0, 3.0, 4.0])}, "integers"),
     ({"scores": torch.zeros(2)}, r"\[2\].*\[3\]"),
     ({"scores": None}, "nothing to place"),
     ({"step_rewards": torch.zeros(3, 5)}, r"\[3, 5\].*\[3, 4\]"),
     ({"action_dim": 0}, "action_dim")],
)  # fmt: skip
def test_bad_input(changes, message):
    arguments = {"finish_step": FINISH, "num_tokens": TOKENS, "action_dim": DIM, "scores": torch.zeros(3), **changes}
    with pytest.raises(ValueError, match=message):
        assemble_rewards(**arguments)


def test_kl_is_subtracted_on_valid_tokens_only():
    b = random_batch(1)
    kl = b["adv"].requires_grad_()
    rewards = add_kl_penalty(b["rewards"], kl, b["mask"], 0.3)
    assert not rewards.requires_grad
    assert (rewards[~b["mask"]] == 0).all()
    torch.testing.assert_close(rewards[b["mask"]], (b["rewards"] - 0.3 * kl.detach())[b["mask"]])
    with pytest.raises(ValueError, match="coef"):
        add_kl_penalty(b["rewards"], kl, b["mask"], -0.1)
    with pytest.raises(ValueError, match="bool"):
        add_kl_penalty(b["rewards"], kl, b["mask"].float(), 0.1)
