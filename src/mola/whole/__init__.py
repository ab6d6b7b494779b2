"""Laplace approximations over all of a network's weights, or over a subnetwork of them."""
