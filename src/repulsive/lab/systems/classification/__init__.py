"""Sentence classification: the self-attentive classifier of Lin et al. (2017), the paper's first system."""
