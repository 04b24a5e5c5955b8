"""rlvla: reinforcement-learning post-training of vision-language-action robot policies."""

from rlvla.version import __version__

__all__ = ["__version__"]
