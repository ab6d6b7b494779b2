"""The page of `mola evaluate`: methods side by side on a user's own data."""
