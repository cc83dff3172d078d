"""Translation with a Transformer, the paper's second system."""
