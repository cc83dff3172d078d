"""`python -m repulsive` is the `repulsive` command."""

from repulsive.cli import main

main()
