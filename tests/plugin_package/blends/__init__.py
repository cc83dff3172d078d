"""An attention class, its family, a rule, a task and a logger, as a package outside of repulsive would add them."""
