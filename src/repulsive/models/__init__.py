"""The systems of the paper as plain networks that do not know repulsion exists."""
