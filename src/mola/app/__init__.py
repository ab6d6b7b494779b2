"""What users run: the command line, jobs on their own networks and data, and the explorer."""
