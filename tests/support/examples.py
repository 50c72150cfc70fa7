"""How many examples of a property are tried: fewer in `make suite` than in `make soak`."""

from hypothesis import settings

USUAL = 100  # what hypothesis tries where a test states nothing
FEWEST = 10


def examples(stated: int) -> int:
    """The examples to try of those that a property states: as many more or fewer as the profile tries of the usual
    number, but in the suite no fewer than 10, or than stated."""
    return max(stated * settings.default.max_examples // USUAL, min(stated, FEWEST))
