"""Allowed values of settings of LeRobot policies; importable without torch."""

from __future__ import annotations

# What values are read from: the expert's output at t = 1, or the mean of what it attends to.
EXPERT, PREFIX = "expert", "prefix"
CRITIC_FEATURES = (EXPERT, PREFIX)
