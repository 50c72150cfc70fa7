"""Measures op times, bytes and messages on the user's own stages."""
