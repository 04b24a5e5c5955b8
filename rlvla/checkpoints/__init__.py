"""Training checkpoints, policy folders, run folders."""
