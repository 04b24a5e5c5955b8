"""Actors of off-policy learners: a bounded Gaussian over a chunk, or over the parameters of action primitives."""
