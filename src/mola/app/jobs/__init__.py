"""The work of the commands on a user's networks and data: fit, predict, evaluate and export."""
