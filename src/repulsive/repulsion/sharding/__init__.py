"""Weights sharded over ranks: placements, and the part that each rank works on."""
