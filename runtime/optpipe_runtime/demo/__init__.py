"""A small training for `optpipe demo`: a byte-level GPT on the source code of Python's standard library."""
