"""Trainers, experience making, evaluation."""
