"""A local page to play with a posterior: change a picture, and watch what MAP, the ensemble and MoLA make of it."""
