"""The same examples on every machine, and no deadline: machines are noisy."""

from hypothesis import settings

settings.register_profile("optpipe", deadline=None, derandomize=True)
settings.load_profile("optpipe")
