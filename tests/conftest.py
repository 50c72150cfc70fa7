"""The same examples on every machine, and no deadline: machines are noisy. Databases for whoever asks."""

from hypothesis import settings
from support.postgres import database, database_url, postgres, postgres_url, sqlite_url

__all__ = ["database", "database_url", "postgres", "postgres_url", "sqlite_url"]  # fixtures

settings.register_profile("optpipe", deadline=None, derandomize=True)
settings.load_profile("optpipe")
