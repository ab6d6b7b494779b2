"""Result objects in; tables, figures and pages out. Never a model."""
