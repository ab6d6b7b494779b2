"""Tables, figures and pages, which are made from result objects alone, without access to models."""
