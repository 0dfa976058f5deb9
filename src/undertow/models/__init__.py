"""Native models: architectures that transformers does not have."""
