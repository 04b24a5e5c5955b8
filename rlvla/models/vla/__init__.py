"""OpenVLA models in the public checkpoint format: configuration, model, preprocessing, action tokens."""
