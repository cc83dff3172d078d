"""Metrics of predictions and attention, and statistical comparison of systems."""
