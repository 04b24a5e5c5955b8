"""Running `cli/train_sac_vla.py`."""
