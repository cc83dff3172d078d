"""A language pair small enough to learn in a moment; the package has it."""

from repulsive.lab.systems.translation.toy import DIGITS, sentence, write_pairs

__all__ = ["DIGITS", "sentence", "write_pairs"]
