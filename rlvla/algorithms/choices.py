"""Names of the options in this package; importing them does not import torch."""

from __future__ import annotations

KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "full")
AGGREGATION_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "traj-mean-token-mean",
)
# Of `rlvla.algorithms.rollout_correction`.
CORRECTION_LEVELS = ("token", "sequence")
CORRECTION_MODES = ("tis", "icepop", "seq_mask_tis")
REJECTION_STATISTICS = ("k1", "k2", "k3")
# What the K numbers of a decision are that a policy gives and a policy loss reads: log-probs; log-probs of every
# denoising step on its own; negative flow-matching losses; log-probs, and how far the network has left what sampled.
SCORES = ("log_probs", "step_log_probs", "matching", "mirrored")
# Of `rlvla.algorithms.flow`.
FLOW_METHODS = ("ode", "sde", "cps", "noise")
FLOW_NOISY_STEPS = ("one", "all")
# Of `rlvla.algorithms.off_policy`: how the values of an ensemble of critics become one.
CRITIC_REDUCTIONS = ("min", "mean")
