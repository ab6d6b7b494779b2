"""Posteriors, checkpoints and weights on disk: safetensors and JSON, written atomically; nothing is unpickled."""
