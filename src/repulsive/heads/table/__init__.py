"""Attention classes whose layout is recorded as data, and the code that matches a model against them.

`families` is the table, with layouts that `parse_layout` reads; `surveyed_classes` lists classes that fit a signature.
`lookup` matches a model, one module at a time with `match`.
"""
