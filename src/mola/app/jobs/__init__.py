"""Work for a user's own networks and data: fit, predict, evaluate, from names and files to files."""
