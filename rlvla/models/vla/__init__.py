"""OpenVLA-style architectures in the public checkpoint format: configuration, model, processing, action tokens."""
