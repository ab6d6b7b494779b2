"""Choose the prior precision and the scaling of logits on held-out data."""
