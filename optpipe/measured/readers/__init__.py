"""Readers of what other programs have measured, one module a form: `READERS` has them all.

A new one is a class with what `Reader` asks for, and a line here; CONTRIBUTING has the recipe.
"""

from __future__ import annotations

from optpipe.measured.readers.csv_table import CsvTable
from optpipe.measured.readers.megatron_timers import MegatronTimers
from optpipe.measured.readers.primus import Primus
from optpipe.measured.readers.straggler import StragglerTimeline
from optpipe.measured.readers.torch_trace import TorchTrace
from optpipe.measured.recording import Reader, RunFacts

__all__ = ["READERS", "RunFacts"]

# In the order in which they are asked whether they recognize a file.
READERS: dict[str, Reader] = {
    reader.name: reader for reader in (TorchTrace(), Primus(), StragglerTimeline(), MegatronTimers(), CsvTable())
}
