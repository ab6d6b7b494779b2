"""Choose the prior precision and the mixture weights on held-out data, in one pass of the networks."""
