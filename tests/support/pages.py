"""Tables of the documentation, so that tests can hold what stands there against what is measured."""

from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is `first`, without its heading and the line below."""
    lines = iter((DOCS / page).read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(f"| {first} |"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
