"""The common parts of reinforcement-learning runs: checks of folders and flags, resuming, the summary."""
