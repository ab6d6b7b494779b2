"""The command line, the jobs that it runs on the user's networks and data, and the explorer."""
