"""Allowed values of settings of LeRobot policies; importable without torch."""

from __future__ import annotations

# What `--pretrain tiny` can build: a transformer on action tokens, or a flow policy in LeRobot's format.
TINY_FAMILIES = ("openvla", "smolvla")
# What values are read from: the expert's output at t = 1, or the mean of what it attends to.
EXPERT, PREFIX = "expert", "prefix"
CRITIC_FEATURES = (EXPERT, PREFIX)
