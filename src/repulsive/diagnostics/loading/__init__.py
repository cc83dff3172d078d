"""Load a model by folder or import path, and make batches for it from text or example inputs."""
