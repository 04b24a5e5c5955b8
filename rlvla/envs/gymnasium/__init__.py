"""Suites `gym:ENV_ID`: Gymnasium environments with continuous actions. Registering them does not import gymnasium."""

from rlvla.envs.gymnasium.env import PREFIX, register_environment

register_environment(f"{PREFIX}ENV_ID")  # placeholder for lists of suites and --help
