"""The 19 corruptions of CIFAR-10-C at 5 severities, generated from their published parameters. Frost is synthetic."""
