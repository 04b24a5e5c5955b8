"""What a pass through a model needs, found by running it on tensors that have no memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlvla.models.actor import pick_tokens
from rlvla.models.config import ActorConfig
from rlvla.models.lora import add_adapters, lora_layers
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.live_bytes import LiveBytes

ZERO3_SMALL = 100_000  # elements; up to here DeepSpeed's ZeRO-3 keeps a parameter whole once it was used


@dataclass(frozen=True)
class RowShape:
    """Sizes of a decision: cameras, and tokens of the prompt."""

    num_images: int
    prompt_tokens: int


@dataclass(frozen=True)
class Probe:
    """A model in numbers. Sizes are counts of elements or bytes.

    Attributes:
        parameters: elements.
        trainable: elements with a gradient.
        weight_bytes: parameters and buffers.
        forward_bytes: most that a pass without gradients holds beyond the weights.
        backward_bytes: most that a micro-batch holds beyond weights and gradients that were there before.
        first_backward_bytes: the same where no gradients were there yet; the new ones are counted in.
        bare_backward_bytes: the same where each gradient is handed on as soon as it is there.
        small: elements of parameters that ZeRO-3 keeps whole because they are small.
        decision_bytes: most that a policy holds beyond the weights to answer a batch of observations.
    """

    parameters: int
    trainable: int
    weight_bytes: int
    forward_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    bare_backward_bytes: int
    small: int = 0
    decision_bytes: int = 0


class _NothingPadded(TorchDispatchMode):
    """Answers the one question that a forward pass asks of its data: whether all prompts are equally long."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True
        return func(*args, **(kwargs or {}))


def probe(
    config: OpenVLAConfig,
    row: RowShape,
    actor: ActorConfig,
    *,
    bf16: bool,
    train_rows: int,
    forward_rows: int,
    play_rows: int = 0,
    scalar_head: bool = False,
) -> Probe:
    """Build a model without memory and run it.

    Args:
        config: of the architecture.
        row: size of a decision.
        actor: adapters and memory options; for a critic or another judge the defaults.
        bf16: type of the weights, else float32.
        train_rows: decisions of a micro-batch; 0: the model is never trained.
        forward_rows: decisions of a pass without gradients.
        play_rows: observations that a policy answers together; 0: it is never asked.
        scalar_head: a critic or reward model.
    """
    live = LiveBytes()
    with torch.device("meta"):
        model = _build(config, actor, scalar_head)
    with ExitStack() as modes:
        for mode in (FakeTensorMode(), live, _NothingPadded()):
            modes.enter_context(mode)
        _place(model, torch.bfloat16 if bf16 else torch.float32)
        live.see(list(model.parameters()), list(model.buffers()))
        forward = _forward_pass(model, config, row, scalar_head)
        gc.collect()
        weights = live.now
        live.reset_peak()
        with torch.no_grad():
            forward(forward_rows)
        needed = live.peak
        live.reset_peak()
        if play_rows:
            _decide(model, config, row, play_rows)
        decision = live.peak
        backward = _backward_peaks(live, model.train(), forward, train_rows) if train_rows else (0, 0, 0)
        parameters = [(p.numel(), p.requires_grad) for p in model.parameters()]
        trainable = sum(n for n, wanted in parameters if wanted) if train_rows else 0
        small = sum(n for n, _ in parameters if n <= ZERO3_SMALL)
        passes = (needed - weights, *backward)
        return Probe(sum(n for n, _ in parameters), trainable, weights, *passes, small, decision - weights)


def _build(config: OpenVLAConfig, actor: ActorConfig, scalar_head: bool) -> nn.Module:
    vla: Any = OpenVLAForActionPrediction(config)
    if actor.gradient_checkpointing:
        vla.gradient_checkpointing_enable()
    if actor.freeze_vision_backbone:
        vla.vision_backbone.requires_grad_(False)
    if actor.lora_rank:
        targets = lora_layers(vla, actor.lora_targets, vision=not actor.freeze_vision_backbone)
        vla = add_adapters(vla, targets, actor.lora_rank, actor.lora_alpha)
    model = nn.ModuleDict({"vla": vla})
    if scalar_head:
        model["head"] = nn.Linear(config.text_config.hidden_size, 1)
    return model


def _place(model: nn.Module, dtype: torch.dtype) -> None:
    """Exchange tensors without a device for ones that seem to be on a device, but have no memory either."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new: torch.Tensor = torch.empty(old.shape, dtype=dtype if old.is_floating_point() else old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if table is module._parameters else new
                table[name] = made[id(old)]


def _forward_pass(
    model: nn.ModuleDict, config: OpenVLAConfig, row: RowShape, scalar_head: bool
) -> Callable[[int], torch.Tensor]:
    """A function of the number of decisions that computes what the trainer makes a loss of, as a scalar."""
    dtype = next(model.parameters()).dtype

    def forward(rows: int) -> torch.Tensor:
        actions = torch.zeros(rows, config.num_action_tokens, dtype=torch.long)
        inputs = (*_observations(config, row, rows, dtype), actions)
        if scalar_head:
            return model["head"](model["vla"].action_hidden_states(*inputs)).squeeze(-1).float().mean()
        log_probs = torch.log_softmax(model["vla"](*inputs).float(), dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return (log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1) + entropy).mean()

    return forward


def _observations(config: OpenVLAConfig, row: RowShape, rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """ids, mask, pixels and proprio."""
    ids = torch.zeros(rows, row.prompt_tokens, dtype=torch.long)
    pixels = torch.zeros(rows, 6 * row.num_images, config.image_size, config.image_size).to(dtype)
    proprio = torch.zeros(rows, config.proprio_dim).to(dtype) if config.use_proprio else None
    return ids, torch.ones_like(ids), pixels, proprio


@torch.no_grad()
def _decide(model: nn.ModuleDict, config: OpenVLAConfig, row: RowShape, rows: int) -> None:
    """Answer observations as the actor does, token by token with a cache or all at once."""
    vla: Any = model["vla"]
    inputs = _observations(config, row, rows, next(model.parameters()).dtype)
    draws = torch.zeros(rows, config.num_action_tokens)
    if config.is_autoregressive:

        def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
            return pick_tokens(logits[:, None].float(), 1.0, draws[:, step : step + 1])[:, 0]

        vla.act_step_by_step(*inputs, choose)
    else:
        pick_tokens(vla(*inputs).float(), 1.0, draws)


def _backward_peaks(
    live: LiveBytes, model: nn.Module, forward: Callable[[int], torch.Tensor], rows: int
) -> tuple[int, int, int]:
    """(gradients there before, none there before, gradients handed on at once), see `Probe`."""
    peaks, before = [], live.now
    for _ in range(2):  # the first pass makes the gradients, the second one adds to them
        live.reset_peak()
        held = live.now
        forward(rows).backward()
        peaks.append(live.peak - held)
    model.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    live.reset_peak()
    forward(rows).backward()
    return peaks[1], peaks[0], live.peak - before
