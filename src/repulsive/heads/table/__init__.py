"""Attention classes whose layout is recorded as data, and the code that matches a model against them.

`families` is the table, with layouts that `parse_layout` reads. `surveyed_classes` lists classes whose heads a survey
proved. `lookup` matches all modules of a model, each with `match`.
"""
