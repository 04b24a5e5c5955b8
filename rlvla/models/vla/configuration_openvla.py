"""Configuration of an OpenVLA checkpoint: the public `config.json` plus platform constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from rlvla.models.sizes import size_problems
from rlvla.models.vla.choices import (
    ACTION_STD_KINDS,
    MAX_NOISE_CORRELATION,
    MAX_STD,
    MIN_STD,
    MODEL_VARIANTS,
    REGRESSION,
)
from rlvla.models.vla.vision import TowerConfig, tower_config
from rlvla.utils.errors import ConfigError

# The Llama-2 token for a single space; public checkpoints were trained with it after "Out:".
LLAMA_PROMPT_END_TOKEN_ID = 29871
PUBLIC_TIMM_MODEL_IDS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
PROMPT_STYLES = ("openvla", "vicuna")
IMAGE_PREPROCESSING = ("libero", "none")
ACTION_NORMALIZATION_MODES = ("q99", "bounds")
GRIPPER_CONVENTIONS = ("none", "libero")
# LIBERO's chunk length; plain OpenVLA predicts one action.
DEFAULT_CHUNK = {"oft": 8, "autoregressive": 1, "oft_regression": 8}
# For actions in [-1, 1].
DEFAULT_ACTION_STD = 0.1
# Settings by which transformers would fetch and run code, kernels or quantizers.
_NAMING_CODE = {"auto_map", "custom_pipelines", "quantization_config", "trust_remote_code", "use_kernels"}
_NAMING_CODE |= {"kernel_config", "attn_implementation", "experts_implementation"}
_NAMING_CODE |= {
    f"_{name}{end}" for name in ("attn_implementation", "experts_implementation") for end in ("", "_internal")
}


def without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file without those that name code, or would replace methods of the configuration."""
    return {name: value for name, value in settings.items() if name not in _NAMING_CODE and not _is_method(name)}


def _is_method(name: str) -> bool:
    attribute = getattr(PretrainedConfig, name, None)
    read_only = isinstance(attribute, property) and attribute.fset is None
    return name in ("self", "attribute_map") or callable(attribute) or read_only or name.startswith("__")


class OpenVLAConfig(PretrainedConfig):
    """Architecture and platform constants of an OpenVLA model.

    Keys of public checkpoints keep their names and meanings. Public files lack the platform constants (action chunk,
    action dimensions, images, proprio). By default the chunk is LIBERO's 8 x 7 (1 x 7 for the autoregressive variant),
    the number of images follows from the input, and proprio and FiLM follow from the tensors.

    Args:
        text_config: configuration of the Llama decoder, as a dict or a `LlamaConfig`.
        timm_model_ids: names of the two towers, DINOv2-like first, SigLIP-like second.
        image_sizes: side of the square input image of each tower, in pixels; both must be equal.
        timm_model_kwargs: one dict per tower that overrides the defaults of its name (timm's argument names).
        timm_override_act_layers: None or "quick_gelu" per tower.
        pad_token_id: id of the padding token, the first row after the tokenizer's vocabulary.
        pad_to_multiple_of: number of rows by which embedding and head exceed the tokenizer's vocabulary.
        n_action_bins: number of action tokens, the last ids of the tokenizer's vocabulary.
        norm_stats: dataset statistics by key, if stored in config.json.
        arch_specifier: projector type; public checkpoints only use the fused GELU MLP.
        model_variant: "oft" (parallel decoding of a chunk with bidirectional attention; the default for None),
            "autoregressive" (one action, token by token, causal attention) or "oft_regression" (like "oft", but a
            regression head predicts the mean of continuous actions).
        action_chunk_len: actions per decision, A; None gives 8 (oft) or 1 (autoregressive).
        action_dim: dimensions of one action, D.
        num_images_in_input: cameras per decision, N; None takes it from the pixel values.
        use_proprio: whether one proprio token follows the patches; None takes it from the checkpoint's tensors.
        proprio_dim: length of the proprio vector, P.
        use_film: whether the mean language embedding modulates the vision blocks; None takes it from the checkpoint's
            tensors.
        prompt_style: "openvla", or "vicuna" (OpenVLA v0.1); None takes it from the name of the language model.
        prompt_end_token_id: last token of every prompt.
        center_crop: whether images are cropped to 90 % of their area before normalization.
        image_preprocessing: "libero" (rotate by 180 degrees, JPEG, Lanczos) or "none" (unchanged camera images).
        action_normalization: "q99" (LIBERO, BRIDGE) or "bounds" (ALOHA, RoboTwin).
        action_std: standard deviation of "oft_regression" actions: "learned" (a parameter per dimension), "features"
            (also depends on the hidden states) or "fixed".
        action_std_init: initial standard deviation, for normalized actions.
        action_noise_correlation: AR(1) coefficient of the noise of "oft_regression" actions over a chunk.
        gripper_convention: "libero" (1 = open in the checkpoint, -1 = open in the simulator) or "none".
        **kwargs: other keys of the file, kept when saving.

    Raises:
        ConfigError: lists all invalid or contradictory settings.
    """

    model_type = "openvla"
    sub_configs = {"text_config": LlamaConfig}

    def __init__(
        self,
        text_config: dict[str, Any] | LlamaConfig | None = None,
        timm_model_ids: list[str] | None = None,
        image_sizes: list[int] | None = None,
        timm_model_kwargs: list[dict[str, Any]] | None = None,
        timm_override_act_layers: list[str | None] | None = None,
        use_fused_vision_backbone: bool = True,
        pad_token_id: int = 32000,
        pad_to_multiple_of: int = 64,
        n_action_bins: int = 256,
        norm_stats: dict[str, Any] | None = None,
        arch_specifier: str = "no-align+fused-gelu-mlp",
        model_variant: str | None = None,
        action_chunk_len: int | None = None,
        action_dim: int = 7,
        num_images_in_input: int | None = None,
        use_proprio: bool | None = None,
        proprio_dim: int | None = None,
        use_film: bool | None = None,
        prompt_style: str | None = None,
        prompt_end_token_id: int = LLAMA_PROMPT_END_TOKEN_ID,
        center_crop: bool = True,
        image_preprocessing: str = "none",
        action_normalization: str = "q99",
        gripper_convention: str = "none",
        action_std: str | None = None,
        action_std_init: float | None = None,
        action_noise_correlation: float | None = None,
        **kwargs: Any,
    ):
        if text_config is None:
            text_config = {"vocab_size": 32064, "pad_token_id": pad_token_id}
        if not isinstance(text_config, LlamaConfig):
            try:
                text_config = LlamaConfig(**without_code(text_config))
            except Exception as error:  # transformers raises its own validation errors
                text = f"text_config of config.json cannot be used ({' '.join(str(error).split())})"
                raise ConfigError.of(None, "invalid_file", text) from error
        self.text_config: LlamaConfig = text_config
        self.timm_model_ids = list(timm_model_ids or PUBLIC_TIMM_MODEL_IDS)
        self.image_sizes = list(image_sizes or [224, 224])
        self.timm_model_kwargs = timm_model_kwargs
        self.timm_override_act_layers = timm_override_act_layers
        self.use_fused_vision_backbone = use_fused_vision_backbone
        self.pad_to_multiple_of = pad_to_multiple_of
        self.n_action_bins = n_action_bins
        self.norm_stats = norm_stats
        self.arch_specifier = arch_specifier
        self.model_variant = model_variant or "oft"
        default_chunk = DEFAULT_CHUNK.get(self.model_variant, 1)
        self.action_chunk_len = default_chunk if action_chunk_len is None else action_chunk_len
        self.action_dim = action_dim
        self.num_images_in_input = num_images_in_input
        self.use_proprio = use_proprio
        self.proprio_dim = proprio_dim
        self.use_film = use_film
        # OpenVLA v0.1 names Vicuna as its language model in these keys.
        named = f"{kwargs.get('llm_backbone_id')} {kwargs.get('hf_llm_id')}".lower()
        self.prompt_style = prompt_style or ("vicuna" if "vicuna" in named else "openvla")
        self.prompt_end_token_id = prompt_end_token_id
        self.center_crop = center_crop
        self.image_preprocessing = image_preprocessing
        self.action_normalization = action_normalization
        self.gripper_convention = gripper_convention
        if self.has_regression_head:  # config.json of other variants stays unchanged
            self.action_std = action_std or ACTION_STD_KINDS[0]
            self.action_std_init = DEFAULT_ACTION_STD if action_std_init is None else action_std_init
            self.action_noise_correlation = action_noise_correlation or 0.0
        elif (action_std, action_std_init, action_noise_correlation) != (None, None, None):
            raise ConfigError(
                "action_std, action_std_init and action_noise_correlation belong to model_variant "
                f"{REGRESSION}, not to {self.model_variant}; leave them out"
            )
        super().__init__(**{"pad_token_id": pad_token_id, **without_code(kwargs)})
        problems = self.problems()
        if problems:
            raise ConfigError(problems)

    @property
    def base_vocab_size(self) -> int:
        """Vocabulary size of the tokenizer, without padding rows; the last `n_action_bins` ids are action tokens."""
        return self.text_config.vocab_size - self.pad_to_multiple_of

    @property
    def proprio_width(self) -> int:
        """P; 0 if proprio is not read."""
        return (self.proprio_dim or 0) if self.use_proprio else 0

    @property
    def num_action_tokens(self) -> int:
        """Action tokens per decision, A * D."""
        return self.action_chunk_len * self.action_dim

    @property
    def largest_activation(self) -> int:
        """See `Checkpoint.largest_activation`: pixels, scores of the attention, or logits of the action tokens."""
        cameras = self.num_images_in_input or 1
        tokens = self.num_action_tokens + cameras * self.tower_configs()[0].num_patches
        scores = self.text_config.num_attention_heads * tokens**2
        return max(6 * cameras * self.image_size**2, scores, self.num_action_tokens * self.n_action_bins)

    @property
    def is_autoregressive(self) -> bool:
        """Whether actions are decoded token by token."""
        return self.model_variant == "autoregressive"

    @property
    def has_regression_head(self) -> bool:
        """Whether actions are continuous, with their mean from a regression head."""
        return self.model_variant == REGRESSION

    @property
    def image_size(self) -> int:
        """Side of the square input image in pixels."""
        return self.image_sizes[0]

    def tower_configs(self) -> tuple[TowerConfig, TowerConfig]:
        """Shapes of the DINOv2-like and SigLIP-like towers, in this order."""
        kwargs = self.timm_model_kwargs or [{}, {}]
        acts = self.timm_override_act_layers or [None, None]
        first, second = (
            tower_config(self.timm_model_ids[i], self.image_sizes[i], kwargs[i], act_layer=acts[i]) for i in (0, 1)
        )
        if self.use_film:
            width = self.text_config.hidden_size
            return replace(first, film_dim=width), replace(second, film_dim=width)
        return first, second

    def problems(self) -> list[str]:
        """One sentence per invalid setting; empty if there are none."""
        problems = self._platform_problems()
        names = [
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"),
            *("num_hidden_layers", "max_position_embeddings", "head_dim"),
        ]
        sizes = {name: getattr(self.text_config, name) for name in names}
        problems += [f"text_config: {text}" for text in size_problems(sizes, layers="num_hidden_layers")]
        if not self.use_fused_vision_backbone or len(self.timm_model_ids) != 2:
            problems.append(
                f"the model needs two vision towers, but timm_model_ids is {self.timm_model_ids} and "
                f"use_fused_vision_backbone is {self.use_fused_vision_backbone}; use a checkpoint with a fused backbone"
            )
        elif len(self.image_sizes) != 2 or len(set(self.image_sizes)) != 1:
            problems.append(f"image_sizes is {self.image_sizes}; give two equal sizes, one per tower")
        else:
            for name in ("timm_model_kwargs", "timm_override_act_layers"):
                value = getattr(self, name)
                if value is not None and len(value) != 2:
                    problems.append(f"{name} has {len(value)} entries; give one per tower")
        if not problems:
            try:
                first, second = self.tower_configs()
                if first.num_patches != second.num_patches:
                    problems.append(
                        f"the towers give {first.num_patches} and {second.num_patches} patches; make them equal"
                    )
            except ConfigError as error:
                problems += map(str, error.problems)
        return problems

    def _platform_problems(self) -> list[str]:
        problems = []
        if self.model_variant not in MODEL_VARIANTS:
            problems.append(f"model_variant {self.model_variant!r} is unknown; use one of {list(MODEL_VARIANTS)}")
        if self.is_autoregressive and self.action_chunk_len != 1:
            problems.append(
                f"action_chunk_len is {self.action_chunk_len}, but the autoregressive variant predicts one action; "
                "leave it out, or set model_variant oft"
            )
        if self.has_regression_head and self.action_std not in ACTION_STD_KINDS:
            problems.append(f"action_std {self.action_std!r} is unknown; use one of {list(ACTION_STD_KINDS)}")
        if self.has_regression_head and not MIN_STD <= self.action_std_init <= MAX_STD:
            problems.append(
                f"action_std_init is {self.action_std_init}; give the standard deviation of actions in [-1, 1], "
                f"{MIN_STD} to {MAX_STD}"
            )
        if self.has_regression_head and not 0 <= self.action_noise_correlation <= MAX_NOISE_CORRELATION:
            problems.append(
                f"action_noise_correlation is {self.action_noise_correlation}; give 0 to {MAX_NOISE_CORRELATION}"
            )
        if "fused-gelu-mlp" not in self.arch_specifier:
            problems.append(
                f"arch_specifier {self.arch_specifier!r} is unknown; only 'no-align+fused-gelu-mlp' is supported"
            )
        for name in ("action_chunk_len", "action_dim", "n_action_bins"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; give a positive number")
        if self.num_images_in_input is not None and self.num_images_in_input < 1:
            problems.append(f"num_images_in_input is {self.num_images_in_input}; give at least 1")
        if self.use_proprio and (self.proprio_dim is None or self.proprio_dim < 1):
            problems.append(
                f"use_proprio is set, but proprio_dim is {self.proprio_dim}; give the length of the proprio vector"
            )
        if self.n_action_bins >= self.base_vocab_size:
            problems.append(
                f"{self.n_action_bins} action bins do not fit into a vocabulary of {self.base_vocab_size} tokens "
                "(text_config.vocab_size - pad_to_multiple_of)"
            )
        for name, allowed in (
            ("image_preprocessing", IMAGE_PREPROCESSING),
            ("action_normalization", ACTION_NORMALIZATION_MODES),
            ("gripper_convention", GRIPPER_CONVENTIONS),
            ("prompt_style", PROMPT_STYLES),
        ):
            if getattr(self, name) not in allowed:
                problems.append(f"{name} {getattr(self, name)!r} is unknown; use one of {list(allowed)}")
        return problems
