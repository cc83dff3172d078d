"""What several systems share when they read text: lines, tokens, batches, and preparing a dataset."""
