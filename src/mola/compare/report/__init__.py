"""Tables, figures and pages made from result objects, without access to models."""
