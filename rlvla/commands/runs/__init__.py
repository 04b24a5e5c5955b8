"""What all reinforcement-learning runs share: checks of folders and flags, resuming, the summary."""
