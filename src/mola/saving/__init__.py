"""Posteriors, checkpoints and weights on disk: atomic, versioned, checksummed. Nothing is unpickled."""
