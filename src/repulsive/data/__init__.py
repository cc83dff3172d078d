"""Readers: files in, examples out. One file per task; only `movie_reviews` fetches anything."""
