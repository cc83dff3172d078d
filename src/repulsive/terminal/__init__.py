"""Output of commands: tables that fit a terminal, JSON documents and progress bars."""
