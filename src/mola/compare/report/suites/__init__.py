"""Reports of benchmark suites, from their stored records alone."""
