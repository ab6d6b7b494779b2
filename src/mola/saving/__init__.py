"""Storage of posteriors, checkpoints and weights, which are written atomically as safetensors and JSON. Nothing is unpickled."""
