"""Evaluation of policies: outcomes, protocol, comparison, report."""
