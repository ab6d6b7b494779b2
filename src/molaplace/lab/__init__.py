"""The paper's experiments: data sets, corruptions, named networks, benchmark suites, and the cost of each method."""
