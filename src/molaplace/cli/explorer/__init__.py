"""A local web page for exploring a posterior: the user changes a picture and compares MAP, the deep ensemble and MoLA."""
