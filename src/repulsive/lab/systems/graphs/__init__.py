"""Text from knowledge graphs with GraphWriter, the paper's fourth system."""
