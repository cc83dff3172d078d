"""The version of the package. Everything else reads it from here."""

__version__ = "0.1.0.dev0"
