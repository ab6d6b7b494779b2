"""Posteriors, checkpoints and weights on disk: safetensors beside JSON, written atomically; nothing is unpickled."""
