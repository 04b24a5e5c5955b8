"""Allowed values of checkpoint settings; importable without torch."""

from __future__ import annotations

REGRESSION = "oft_regression"
MODEL_VARIANTS = ("oft", "autoregressive", REGRESSION)
ACTION_STD_KINDS = ("learned", "features", "fixed")
ATTENTION_IMPLEMENTATIONS = ("sdpa", "flash_attention_2")
