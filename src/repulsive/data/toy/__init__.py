"""Data that are made, not collected: small enough to be learned in seconds, in the layouts of the real sets.

They are there to see that everything runs. What comes out on them says nothing about language.
"""
