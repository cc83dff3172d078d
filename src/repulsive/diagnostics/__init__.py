"""Measure the heads of any model: similarity, redundancy, importance, calibration and uncertainty; prune heads."""
