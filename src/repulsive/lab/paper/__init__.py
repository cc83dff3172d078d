"""Every table and figure of the paper as one command: what it needs, what it runs, and what its claims come to."""
