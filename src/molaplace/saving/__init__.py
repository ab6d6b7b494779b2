"""Save and load posteriors, checkpoints and weights; files are written atomically as safetensors and JSON. Nothing is unpickled."""
