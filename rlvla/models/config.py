"""Flags that set how a policy checkpoint is loaded and prepared for training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlvla.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rlvla.algorithms.choices import FLOW_NOISY_STEPS
from rlvla.models.flow.settings import EVAL_NOISES as FLOW_EVAL_NOISES
from rlvla.models.flow.settings import MAX_STEPS as MAX_FLOW_STEPS
from rlvla.models.flow.settings import METHODS as FLOW_METHODS
from rlvla.models.lerobot.settings import CRITIC_FEATURES
from rlvla.models.vla.choices import (
    ACTION_STD_KINDS,
    ATTENTION_IMPLEMENTATIONS,
    MAX_NOISE_CORRELATION,
    MODEL_VARIANTS,
    PLATFORMS,
)
from rlvla.options import Condition, arg, given

VARIANT_HELP = (
    "action decoding of the checkpoint: oft (a chunk of tokens at once), autoregressive (one action, token by token), "
    "oft_regression (a chunk of continuous actions from OFT's regression head); detected from its files if possible"
)
ACTION_STD_HELP = (
    "standard deviation around a regression head's actions: learned (a parameter per dimension), features (also from "
    "the hidden states) or fixed (default: the checkpoint's, else learned)"
)
ACTION_STD_INIT_HELP = (
    "start with this standard deviation of a regression head's actions, in [-1, 1] (default: the checkpoint's, else "
    "0.1)"
)
CAMERA_MAP_HELP = (
    "image feature of a LeRobot policy for each camera, e.g. agentview=observation.images.image (default: the "
    "checkpoint's, else features named like cameras)"
)
PLATFORM_HELP = (
    "platform of a public checkpoint: sets chunk, action dimensions, normalisation, LIBERO's image preprocessing and "
    "gripper where config.json has no value; libero rotates the images for a LeRobot policy (default: config.json is "
    "complete)"
)


@dataclass(frozen=True)
class ActorConfig:
    """How a policy checkpoint is prepared for training."""

    lora_rank: int = arg(
        0,
        "rank of LoRA adapters on the layers of --lora_targets (0: train all weights)",
        minimum=0,
        maximum=65_536,
        essential=True,
        aliases=("lora_r",),
    )
    lora_alpha: int = arg(
        16, "LoRA scale is lora_alpha / lora_rank", minimum=1, maximum=65_536, read_if=given("lora_rank")
    )
    lora_dropout: float = arg(
        0.0,
        "supervised training: dropout on the inputs of the adapters (PPO refuses it)",
        minimum=0,
        below=1,
        read_if=given("lora_rank"),
    )
    lora_targets: tuple[str, ...] = arg(
        ("language",),
        "layers with adapters: language (every linear layer of the language model, and of a LeRobot policy's expert), "
        "expert, all-linear (also towers and projectors), or names of layers such as q_proj v_proj",
        nargs="+",
        metavar="NAME",
        aliases=("target_modules", "lora_target_modules"),
        read_if=given("lora_rank"),
    )
    freeze_vision_backbone: bool = arg(False, "freeze the vision towers, also of a critic, and add no adapters to them")
    train_expert_only: bool | None = arg(
        None,
        "a LeRobot policy: train the action expert and freeze the vision-language model (default: yes in reinforcement "
        "learning, else the checkpoint's)",
    )
    gradient_checkpointing: bool = arg(
        False,
        "recompute activations of towers and decoder in the backward pass, also of a critic",
        aliases=("enable_gradient_checkpointing",),
    )
    attn_implementation: str = arg(
        "sdpa",
        "attention kernel of the decoder, also of critic and reference; flash_attention_2 needs a GPU and the package "
        "flash-attn",
        choices=ATTENTION_IMPLEMENTATIONS,
    )

    def without_adapters(self) -> ActorConfig:
        """The same options without LoRA, for networks other than the policy."""
        return replace(self, lora_rank=0, lora_dropout=0.0, lora_targets=ActorConfig.lora_targets)


@dataclass(frozen=True)
class PolicyConfig:
    """The policy checkpoint and its settings."""

    pretrain: str = arg(
        "runs/sft/policy",
        "checkpoint folder of the policy",
        metavar="DIR",
        essential=True,
        aliases=("model_name_or_path",),
    )
    unnorm_key: str | None = arg(
        None, "entry of the dataset statistics (default: the suite's name, or the only one)", metavar="KEY"
    )
    action_chunk_len: int | None = arg(
        None,
        "actions per decision; must agree with the checkpoint, but a LeRobot policy may execute fewer than it predicts "
        "(default: the checkpoint's)",
        minimum=1,
        maximum=10_000,
        aliases=("n_action_steps",),
    )
    num_images_in_input: int | None = arg(
        None,
        "cameras per decision; must agree with --cameras and the checkpoint (default: the checkpoint's)",
        minimum=1,
        maximum=64,
    )
    center_crop: bool | None = arg(None, "crop images to 90 % of their area (default: the checkpoint's)")
    model_variant: str | None = arg(None, VARIANT_HELP, choices=MODEL_VARIANTS)
    platform: str | None = arg(None, PLATFORM_HELP, choices=tuple(PLATFORMS))
    action_std: str | None = arg(None, ACTION_STD_HELP, choices=ACTION_STD_KINDS)
    action_std_init: float | None = arg(None, ACTION_STD_INIT_HELP, above=0)
    action_noise_correlation: float | None = arg(
        None,
        "correlation of the exploration noise of consecutive actions of a chunk, for Gaussian policies (default: the "
        "checkpoint's, else 0)",
        minimum=0,
        maximum=MAX_NOISE_CORRELATION,
    )
    camera_map: tuple[str, ...] = arg(
        (), CAMERA_MAP_HELP, nargs="+", metavar="CAMERA=FEATURE", of=("policy", "LeRobot")
    )
    critic_features: str | None = arg(
        None,
        "features of a LeRobot policy's critic: expert (its output for each action at the start of denoising) or "
        "prefix (mean of the tokens that the expert attends to) (default: the checkpoint's, else expert)",
        choices=CRITIC_FEATURES,
        of=("policy", "LeRobot"),
        read_if=(
            Condition(
                lambda flags: (
                    "advantage_estimator" in flags
                    and "values" in ADVANTAGE_ESTIMATORS.parameters(flags["advantage_estimator"])
                ),
                "there is no critic",
            ),
            Condition(lambda flags: flags.get("critic_input") != "state", "--critic_input state does not read them"),
        ),
    )
    guidance: float | None = arg(
        None,
        "an advantage-conditioned policy: weight of the condition when acting; 1 acts on it alone, 0 without it "
        "(default: the checkpoint's)",
        minimum=0,
        maximum=100,
    )
    flow_method: str | None = arg(
        None,
        "noise of a flow policy's denoising steps: sde (keeps the ODE's distribution), cps (adds less noise than it "
        "removes), noise (a learned standard deviation) or ode (none; training needs --policy_loss fpo) (default: the "
        "checkpoint's, else sde)",
        choices=FLOW_METHODS,
        of=("policy", "flow matching"),
    )
    flow_noise_level: float | None = arg(
        None,
        "noise level of sde and cps (default: the checkpoint's, else 0.5)",
        above=0,
        maximum=1,
        of=("policy", "flow matching"),
    )
    flow_steps: int | None = arg(
        None,
        "denoising steps of a flow policy (default: the checkpoint's)",
        minimum=1,
        maximum=MAX_FLOW_STEPS,
        of=("policy", "flow matching"),
    )
    flow_noisy_steps: str | None = arg(
        None,
        "denoising steps that are noisy and enter the probability ratio: one, drawn at random for each decision, or "
        "all (default: the checkpoint's, else one)",
        choices=FLOW_NOISY_STEPS,
        of=("policy", "flow matching"),
    )
    flow_eval_noise: str | None = arg(
        None,
        "greedy decisions of a flow policy start from a random sample, or from zero (default: the checkpoint's, else "
        "sample)",
        choices=FLOW_EVAL_NOISES,
        of=("policy", "flow matching"),
    )
