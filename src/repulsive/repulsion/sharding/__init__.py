"""Weights that are sharded over ranks: placements and local parts."""
