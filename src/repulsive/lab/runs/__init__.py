"""Finished runs: loading, scoring, comparing and reporting them."""
