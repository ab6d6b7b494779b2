"""The command line, its jobs on the user's networks and data, and the explorer."""
