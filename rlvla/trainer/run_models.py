"""The networks of a PPO run, before DeepSpeed has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from rlvla.models.actor import Actor
from rlvla.models.actor_critic import ActorCritic
from rlvla.models.reference import ReferenceModel
from rlvla.models.value_models import Critic, RewardModel
from rlvla.trainer.setup import Setting

if TYPE_CHECKING:
    from rlvla.trainer.ppo_run import PPORun


@dataclass
class Models:
    """Absent ones are None."""

    actor: Actor
    critic: Critic | None
    reference: ReferenceModel | None
    reward_model: RewardModel | None

    @property
    def frozen(self) -> list[nn.Module]:
        """The networks of their own that are never trained, each the module whose `forward` is called."""
        found: list[nn.Module] = []
        if self.reference is not None and not self.reference.without_adapters:
            found.append(self.reference.actor)
        if self.reward_model is not None:
            found.append(self.reward_model)
        return found


def load_models(flags: PPORun, setting: Setting) -> Models:
    """What a checked configuration asks for, on the host."""
    pretrain, key, overrides = flags.policy.pretrain, setting.unnorm_key, setting.overrides
    shared, beside = flags.algorithm.share_backbone, flags.actor.without_adapters()
    actor = (ActorCritic if shared else Actor).from_pretrained(pretrain, flags.actor, key, **overrides)
    critic = None
    if flags.algorithm.needs_critic and not shared:
        critic = Critic.from_pretrained(flags.run.critic_pretrain or pretrain, key, beside, **overrides)
    reference = None
    if flags.algorithm.init_kl_coef:
        # With adapters the start policy is the trained one without them: no second copy.
        reference = (
            ReferenceModel(actor, without_adapters=True)
            if flags.actor.lora_rank
            else ReferenceModel.from_pretrained(pretrain, key, beside, **overrides)
        )
    reward_model = None
    if flags.run.reward_pretrain:
        reward_model = RewardModel.from_pretrained(flags.run.reward_pretrain, config=beside)
    return Models(actor, critic, reference, reward_model)
