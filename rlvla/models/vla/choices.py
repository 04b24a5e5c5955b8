"""Allowed values of checkpoint settings; importable without torch."""

from __future__ import annotations

REGRESSION = "oft_regression"
MODEL_VARIANTS = ("oft", "autoregressive", REGRESSION)
ACTION_STD_KINDS = ("learned", "features", "fixed")
# Bounds of the standard deviation of normalized actions: below, log-probabilities of float32 actions are meaningless;
# above, nearly every action is clipped.
MIN_STD, MAX_STD = 1e-3, 2.0
ATTENTION_IMPLEMENTATIONS = ("sdpa", "flash_attention_2")
