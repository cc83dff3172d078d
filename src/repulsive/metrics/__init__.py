"""Predictions in, numbers out."""
