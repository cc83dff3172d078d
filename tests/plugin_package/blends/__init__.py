"""An attention class, its family, a rule and a task, as a package outside of repulsive would add them."""
