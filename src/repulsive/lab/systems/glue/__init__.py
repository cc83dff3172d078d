"""Fine-tuning a pre-trained encoder on the tasks of GLUE."""
