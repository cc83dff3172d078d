"""Text code that several systems share: reading lines, tokenising, batching, and preparing a dataset."""
