"""Sharing a policy: what of its folder is uploaded, and the upload."""
