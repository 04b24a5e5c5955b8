"""Loading the networks of a run from a checked configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvla.commands.setup import CheckedRun
from rlvla.models.families import check_checkpoint
from rlvla.models.reference import ReferenceModel
from rlvla.models.state_critic import StateCritic
from rlvla.trainer.algorithm_config import STATE, learner_needs_critic, learner_needs_reference
from rlvla.trainer.models import Models

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun


def load_models(flags: PPORun, setting: CheckedRun) -> Models:
    """Load actor, critic and reference, as far as the configuration uses them, into host memory."""
    checkpoint, folder = setting.checkpoint, flags.critic_folder
    shared, beside = flags.algorithm.share_backbone, flags.actor.without_adapters()
    needs_critic = learner_needs_critic(flags.algorithm)
    actor: Any = checkpoint.load_policy(flags.actor, value_head=shared and needs_critic)
    critic: Any = None
    if needs_critic and flags.algorithm.critic_input == STATE:
        critic = state_critic(setting)
    elif needs_critic and not shared:
        start = check_checkpoint(folder, checkpoint.unnorm_key, overrides=setting.overrides) if folder else checkpoint
        critic = start.load_critic(beside)
    reference = None
    if learner_needs_reference(flags.algorithm):
        # With adapters, the initial policy is the trained one without its adapters, so no second copy is needed.
        initial: Any = actor if flags.actor.lora_rank else checkpoint.load_policy(beside)
        reference = ReferenceModel(initial, without_adapters=bool(flags.actor.lora_rank))
    return Models(actor, critic, reference, setting.overrides)


def state_critic(setting: CheckedRun) -> StateCritic:
    """The critic of `--critic_input state`, see `Sample.critic_state` for its input."""
    longest = max(task.proprio_dim for task in setting.tasks)
    return StateCritic(1 + setting.state_width + longest, setting.spec.columns)
