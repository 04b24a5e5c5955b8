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
# Kinds of the K scores of a decision, which a policy computes and a policy loss reads: log-probs; log-probs of each
# denoising step; negative flow-matching losses; log-probs with the terms of `flow.mirrored_terms`.
SCORES = ("log_probs", "step_log_probs", "matching", "mirrored")
# Of `rlvla.algorithms.flow`.
FLOW_METHODS = ("ode", "sde", "cps", "noise")
FLOW_NOISY_STEPS = ("one", "all")
# Of `rlvla.algorithms.off_policy`: reduction over an ensemble of critics.
CRITIC_REDUCTIONS = ("min", "mean")
