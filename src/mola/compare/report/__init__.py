"""Tables, figures and pages, made only from result objects and without access to models."""
