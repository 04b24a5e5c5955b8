"""OpenVLA policies, with or without a value head on the same network."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlvla.experience import Experience
from rlvla.models.action_heads import GaussianHead, TokenHead, missing_of
from rlvla.models.config import ActorConfig
from rlvla.models.distributions import AutoregressiveTokens
from rlvla.models.families import check_checkpoint, recorded_guidance, type_of
from rlvla.models.lora import InitialModules, MergedWeights, add_adapters, lora_layers, save_adapter
from rlvla.models.network_policy import NetworkPolicy
from rlvla.models.policy import Decision, PolicySpec, Prompts
from rlvla.models.value_models import scalar_head
from rlvla.models.vla.checkpoint_files import ADAPTER_FOLDER
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.inputs import VLAInputs, row_tokens
from rlvla.models.vla.openvla import DecoderInput, OpenVLAForActionPrediction


class Actor(NetworkPolicy):
    """An OpenVLA policy.

    Log-probs and entropies of action tokens are over the 256 action columns at the sampling temperature, in sampling,
    old log-probs and updates alike. With a regression head (`model_variant` oft_regression) actions are continuous,
    with one log-prob per number in the chunk.

    Args:
        vla: the architecture with its weights.
        inputs: turns observations into model inputs.
        config: LoRA and memory options.
    """

    has_value_head: ClassVar[bool] = False
    vla: Any  # OpenVLAForActionPrediction, with LoRA wrapped by peft

    def __init__(self, vla: OpenVLAForActionPrediction, inputs: VLAInputs, config: ActorConfig | None = None):
        vla_config = inputs.config
        regression = vla_config.has_regression_head
        head = GaussianHead(inputs, vla_config.action_noise_correlation) if regression else TokenHead(inputs)
        super().__init__(policy_spec(vla_config), inputs, head)
        self.inputs = inputs
        self.config = config or ActorConfig()
        vla.configure(self.config)
        self._start_head: InitialModules | None = None
        if self.config.lora_rank:
            if vla.action_head is not None:
                self._start_head = InitialModules(vla, ("action_head", "action_std"))
            targets = lora_layers(vla, self.config.lora_targets, vision=not self.config.freeze_vision_backbone)
            vla = add_adapters(vla, targets, self.config.lora_rank, self.config.lora_alpha, self.config.lora_dropout)
        self.vla = vla

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: ActorConfig | None = None,
        unnorm_key: str | None = None,
        **overrides: Any,
    ) -> Any:
        """Load a checkpoint folder in the public format, or the policy of another registered family.

        Args:
            path: folder with config.json, safetensors, tokenizer and dataset_statistics.json.
            config: LoRA and memory options.
            unnorm_key: entry of the dataset statistics; only needed if there are several.
            **overrides: settings that override config.json, e.g. `center_crop`, `model_variant`, `platform`; or
                `dtype` and `device`, see `OpenVLAForActionPrediction.from_pretrained`.

        Raises:
            ConfigError: a missing file, a file of another kind of model, wrong tensors, or an unknown statistics key.
        """
        if type_of(path) != OpenVLAConfig.model_type:
            checkpoint = check_checkpoint(path, unnorm_key, overrides=overrides)
            policy: Any = checkpoint.load_policy(config, value_head=cls.has_value_head)
            return policy.to(device=overrides.get("device"), dtype=overrides.get("dtype"))
        vla = OpenVLAForActionPrediction.from_pretrained(path, **overrides)
        policy = cls(vla, VLAInputs.from_pretrained(path, config=vla.config, unnorm_key=unnorm_key), config)
        policy.guidance = recorded_guidance(path)
        return policy

    def observations(self, images: Tensor, proprio: Tensor | None, instructions: Sequence[str]) -> dict[str, Any]:
        """See `NetworkPolicy.observations`."""
        return self.inputs.observations(images, proprio, instructions, self._device)

    def hidden(
        self,
        trace: dict[str, Tensor],
        *,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        images: Tensor,
        proprio: Tensor | None,
    ) -> Tensor:
        """[B, A*D, d]: hidden states at the action positions.

        Args:
            trace: the decisions; only the autoregressive variant reads their tokens.
            input_ids: [B, L] int64 left-padded prompt.
            attention_mask: [B, L]; None if no prompt is padded.
            images: [B, N, H, W, 3] uint8, prepared.
            proprio: [B, P] float32, normalized, or None.
        """
        ids = None
        if "tokens" in trace:
            ids = self.inputs.action_tokenizer.columns_to_ids(trace["tokens"])
        pixels, state = self._network_inputs(images, proprio)
        return self.base.action_hidden_states(input_ids, attention_mask, pixels, state, ids)

    def read_out(self, hidden: Tensor) -> Any:
        """See `OpenVLAForActionPrediction.read_out`."""
        return self.base.read_out(hidden)

    def _network_inputs(self, images: Tensor, proprio: Tensor | None) -> tuple[Tensor, Tensor | None]:
        dtype = next(self.parameters()).dtype
        return self.inputs.pixel_values(images, dtype), None if proprio is None else proprio.to(dtype)

    def _distribution(self, observations: dict[str, Any], temperature: float) -> Any:
        if not self.inputs.config.is_autoregressive:
            return super()._distribution(observations, temperature)
        prompt = observations["input_ids"], observations["attention_mask"]
        pixels, state = self._network_inputs(observations["images"], observations["proprio"])
        columns_to_ids = self.inputs.action_tokenizer.columns_to_ids
        return AutoregressiveTokens(
            lambda choose: self.vla.act_step_by_step(*prompt, pixels, state, choose),
            lambda tokens: self.vla(*prompt, pixels, state, columns_to_ids(tokens)),
            temperature,
        )

    def prompt_embeddings(
        self, images: np.ndarray, proprio: np.ndarray | None, instructions: Sequence[str]
    ) -> DecoderInput:
        """Decoder input before the first token of an autoregressive policy; arguments as in `act`."""
        state = None if proprio is None else torch.from_numpy(proprio)
        observed = self.observations(torch.from_numpy(images), state, instructions)
        pixels, state = self._network_inputs(observed["images"], observed["proprio"])
        return self.base.prompt_embeddings(observed["input_ids"], observed["attention_mask"], pixels, state)

    def without_decoder(self) -> Actor:
        """A copy for embedding prompts only: its decoder has no layers and no head."""
        language_model: Any = self.base.language_model
        decoder = language_model.model
        layers, decoder.layers = decoder.layers, nn.ModuleList()
        head, language_model.lm_head = language_model.lm_head, nn.Identity()
        try:
            return copy.deepcopy(self)
        finally:
            decoder.layers, language_model.lm_head = layers, head

    def token_decoder(self) -> ServedDecoder:
        """The decoder, for an inference server; only with `PolicySpec.token_by_token`."""
        return ServedDecoder(self)

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RolloutPolicy.prepare`."""
        return self.inputs.prepare(images, proprio)

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """Sequence length of each row."""
        return row_tokens(self.inputs, instructions, num_images)

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """See `Policy.training_flops`."""
        return training_flops(model, num_images * self.inputs.config.tower_configs()[0].num_patches, tokens)

    def freeze_action_std(self) -> None:
        """Freeze the standard deviation of continuous actions, if there is one."""
        if self.base.action_std is not None:
            self.base.action_std.requires_grad_(False)

    def forget_action_heads(self) -> None:
        """Drop the source folder's regression heads, which do not match weights trained on tokens."""
        if self.base.folder is not None:
            self.base.folder.action_heads.clear()

    @property
    def base(self) -> OpenVLAForActionPrediction:
        """The model without its adapter wrapper."""
        return self.vla.get_base_model() if self.config.lora_rank else self.vla

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """Context in which the policy has no adapters and its original head.

        Raises:
            ValueError: the policy has no adapters.
        """
        if not self.config.lora_rank:
            raise ValueError("this policy has no adapters to disable")
        start = self._start_head
        with self.vla.disable_adapter(), nullcontext() if start is None else start.in_place_of(self.base):
            yield

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the policy in the public format; see `Policy.save_pretrained`.

        LoRA adapters are merged into the saved weights, one tensor at a time, and also saved separately in
        `lora_adapter/`, in peft's format.
        """
        state = self._network_state(state_dict)
        if not self.config.lora_rank:
            self.vla.save_pretrained(folder, state_dict=state)
            return
        adapted = self.base
        with torch.device("meta"):  # the architecture without adapters; the tensors come from `state`
            plain = OpenVLAForActionPrediction(adapted.config)
        plain.folder, plain.dataset_statistics = adapted.folder, adapted.dataset_statistics
        plain.save_pretrained(folder, state_dict=self._merged(state))
        save_adapter(Path(folder) / ADAPTER_FOLDER, state, self.vla.peft_config["default"])

    def full_weights(self) -> Mapping[str, torch.Tensor]:
        """The network's tensors under their names in the public format; adapters are merged on access."""
        state = self._network_state()
        return self._merged(state) if self.config.lora_rank else state

    def _network_state(self, state_dict: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The state dict of `vla`, without a value head."""
        state = self.state_dict() if state_dict is None else state_dict
        return {name.removeprefix("vla."): tensor for name, tensor in state.items() if name.startswith("vla.")}

    def _merged(self, state: dict[str, torch.Tensor]) -> MergedWeights:
        return MergedWeights(state, self.config.lora_alpha / self.config.lora_rank)


class ActorCritic(Actor):
    """An `Actor` with a linear value head on the same hidden states; arguments as for `Actor`.

    The value of an action is read at the position of its first token, as in `Critic`. `save_pretrained` writes a plain
    policy without the value head.
    """

    has_value_head = True

    def __init__(self, vla: OpenVLAForActionPrediction, inputs: VLAInputs, config: ActorConfig | None = None):
        super().__init__(vla, inputs, config)
        self.value_head = scalar_head(inputs.config.text_config.hidden_size)

    def score_values(self, batch: Experience) -> dict[str, Any]:
        """See `NetworkPolicy.score_values`; without decisions only the value of the first position is meaningful."""
        if not batch.trace:
            batch = batch.with_fields(trace={"tokens": torch.zeros(len(batch), self.spec.columns, dtype=torch.long)})
        return super().score_values(batch)


def training_flops(model: nn.Module, patches: int, tokens: int) -> float:
    """Floating-point operations of a forward and a backward pass over one decision.

    Two per weight and position in the forward pass, two for the activation gradient, and two for the weight gradient if
    the weight is trained; with all weights trained this is the usual 6ND (Kaplan et al. 2020). Towers and projector
    process the image patches, the rest the whole sequence. Not counted: attention scores, norms, the embedding table,
    recomputation, and activation gradients in a fully frozen vision backbone.

    Args:
        model: the policy or a network of the same architecture, possibly sharded by ZeRO-3.
        patches: image patches per decision, over all its images.
        tokens: length of its whole sequence.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if "embed_tokens" not in name]
    vision_trained = any(p.requires_grad for name, p in parameters if "vision_backbone." in name)
    total = 0.0
    for name, parameter in parameters:
        of_pictures = "vision_backbone." in name or ".projector." in f".{name}"
        through = vision_trained or "vision_backbone." not in name
        per_weight = 2 + 2 * through + 2 * parameter.requires_grad
        total += per_weight * getattr(parameter, "ds_numel", parameter.numel()) * (patches if of_pictures else tokens)
    return total


def policy_spec(config: OpenVLAConfig) -> PolicySpec:
    """The spec of an OpenVLA policy."""
    columns, continuous = config.num_action_tokens, config.has_regression_head
    shape = (config.action_chunk_len, config.action_dim)
    return PolicySpec(
        action_chunk_len=config.action_chunk_len,
        action_dim=config.action_dim,
        columns=columns,
        noise_shape=shape if continuous else (columns,),
        noise="normal" if continuous else "uniform",
        cameras=config.num_images_in_input,
        image_size=None if config.image_preprocessing != "none" or config.center_crop else config.image_size,
        proprio_dim=config.proprio_width,
        feature_dim=config.text_config.hidden_size,
        token_by_token=config.is_autoregressive,
        missing=missing_of(config.model_variant),
    )


_PREFIX = "language_model."
# Tensors with a row per token, cut to the rows of action tokens.
_BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
# Fields of the decoder's configuration that determine its computation.
_KEPT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_parameters"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings"),
)


class ServedDecoder:
    """Implements `TokenDecoder` for `policy`."""

    def __init__(self, policy: Actor):
        self._policy, self._inputs = policy, policy.inputs

    def config(self) -> dict[str, Any]:
        """See `TokenDecoder.config`."""
        config = self._inputs.config
        values = config.text_config.to_dict()
        kept = {name: values[name] for name in _KEPT if values.get(name) is not None}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **kept,
            "vocab_size": config.n_action_bins,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    def weights(self) -> Mapping[str, Tensor]:
        """See `TokenDecoder.weights`."""
        end = self._inputs.config.base_vocab_size
        return _ActionTokenWeights(self._policy.full_weights(), end - self._inputs.config.n_action_bins, end)

    @torch.inference_mode()
    def embed(self, images: np.ndarray, proprio: np.ndarray | None, instructions: Sequence[str]) -> Prompts:
        """See `TokenDecoder.embed`."""
        prompts = self._policy.prompt_embeddings(images, proprio, instructions)
        batch, length = prompts.embeddings.shape[:2]
        return Prompts(prompts.embeddings, [length] * batch if prompts.lengths is None else prompts.lengths.tolist())

    def decision(self, tokens: np.ndarray, log_probs: np.ndarray) -> Decision:
        """See `TokenDecoder.decision`."""
        return Decision(self._inputs.decode_actions(tokens), log_probs, {"tokens": tokens})


class _ActionTokenWeights(Mapping[str, Tensor]):
    """The language model's tensors of a policy, with embedding and head restricted to action tokens."""

    def __init__(self, weights: Mapping[str, Tensor], first: int, end: int):
        self._weights, self._rows = weights, slice(first, end)
        self._names = [name.removeprefix(_PREFIX) for name in weights if name.startswith(_PREFIX)]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[_PREFIX + name].detach()
        return tensor[self._rows] if name in _BY_TOKEN else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
