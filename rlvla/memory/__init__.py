"""Estimates of the memory a run needs."""
