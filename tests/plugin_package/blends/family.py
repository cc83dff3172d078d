"""The layout of Blend."""

from repulsive.heads.table.families import Family

BLEND = Family("blend", ("Blend",), (("blend", "head qkv dim"),), heads=("heads",), out="merge", package="blends")
