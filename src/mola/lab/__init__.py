"""The paper's experiments: data sets, corruptions, networks by name, suites of methods, and the cost of methods."""
