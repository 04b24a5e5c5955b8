"""Replay of past decisions for off-policy learners: storage, priorities, sampling, targets."""
