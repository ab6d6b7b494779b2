"""Reading the user's data: images, arrays and functions, opened by name and read in batches."""
