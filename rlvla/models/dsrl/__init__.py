"""Actors that choose the initial noise of a frozen flow policy (DSRL, Wagenmaker et al. 2025, arXiv 2506.15799)."""
