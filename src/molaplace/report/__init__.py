"""Tables, figures and pages made from result objects alone, without access to models."""
