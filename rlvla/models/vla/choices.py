"""The names that a checkpoint's settings take, told without importing torch."""

from __future__ import annotations

MODEL_VARIANTS = ("oft", "autoregressive")
ATTENTION_IMPLEMENTATIONS = ("sdpa", "flash_attention_2")
