"""Reports of suites: tables, figures and a page made from stored records, beside the paper's numbers."""
