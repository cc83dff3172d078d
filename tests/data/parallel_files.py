"""A language pair small enough to learn in a moment; the package has it."""

from repulsive.data.toy.spelled import DIGITS, sentence, write_pairs

__all__ = ["DIGITS", "sentence", "write_pairs"]
