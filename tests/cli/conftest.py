from support.commands import run

__all__ = ["run"]  # a fixture; a file may have one of its own
