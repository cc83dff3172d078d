"""Attention classes whose layout is recorded as data, and the code that matches a model against them."""
