"""The benchmark suites, each with its data, networks, shifts and outliers."""
