"""What is required of a GPU and what was measured: one row for each requirement, with its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

NOT_MEASURED = "not measured"
Unit = Literal["ms", "%", ""]


@dataclass(frozen=True)
class Row:
    """One figure and its limit. `reached` is None if this device cannot show it; that is neither a pass nor a
    failure."""

    what: str
    asked: Literal["at least", "at most"]
    limit: float
    reached: float | None
    unit: Unit = ""  # if "%", limit and reached are shares

    @property
    def passed(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached >= self.limit if self.asked == "at least" else self.reached <= self.limit  # false for NaN

    @property
    def verdict(self) -> str:
        return NOT_MEASURED if self.passed is None else "pass" if self.passed else "FAIL"

    def text(self, value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.1%}" if self.unit == "%" else f"{value:.4g} {self.unit}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


@dataclass(frozen=True)
class Report:
    """All rows of one run, and further figures by name."""

    device: str
    torch: str
    rows: tuple[Row, ...]
    figures: dict[str, float]
    trace: str  # in the Trace Event format: predicted and measured side by side

    @property
    def passed(self) -> bool:
        """Whether no row failed. A row that was not measured has not failed."""
        return all(row.passed is not False for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """All fields but the trace."""
        return {
            "device": self.device,
            "torch": self.torch,
            "passed": self.passed,
            "rows": [row.to_dict() for row in self.rows],
            "figures": self.figures,
        }
