"""Floating-point operations of training."""

from __future__ import annotations

from torch import nn


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
