"""Pre-training of ELECTRA, the paper's third system."""
