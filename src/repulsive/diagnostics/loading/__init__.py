"""Load the model that a user names, and batches it can read."""
