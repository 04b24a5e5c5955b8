"""What is on disk between runs: training checkpoints, policy folders, run folders."""
