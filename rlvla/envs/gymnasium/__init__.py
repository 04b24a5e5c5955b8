"""Suites `gym:ENV_ID`: any Gymnasium environment with continuous actions. Importing this imports no gymnasium."""

from rlvla.envs.gymnasium.env import PREFIX, register_environment

register_environment(f"{PREFIX}ENV_ID")  # stands for all of them in lists of suites and in --help
