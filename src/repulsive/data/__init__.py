"""Readers: files in, examples out. One file per task; none of them downloads anything."""
