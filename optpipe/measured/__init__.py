"""Measurements of other programs become a `Problem`: their files are read here, and those programs are not imported."""
