"""Posteriors, checkpoints and weights on disk, written atomically as safetensors and JSON. Nothing is unpickled."""
