"""Two ranks for the session."""

from support.ranks.pools import ranks

__all__ = ["ranks"]  # a fixture
