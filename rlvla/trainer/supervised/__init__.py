"""Supervised training: a policy from demonstrations, and reward models."""
