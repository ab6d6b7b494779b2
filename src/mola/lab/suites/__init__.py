"""The suites: each declares its data, networks, shifts and outliers."""
