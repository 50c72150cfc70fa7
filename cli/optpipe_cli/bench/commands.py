"""The commands below `optpipe bench`."""

from __future__ import annotations

import typer

from optpipe_cli.bench.cache import cache
from optpipe_cli.bench.core import core, first
from optpipe_cli.bench.costs import costs
from optpipe_cli.bench.figures import figures
from optpipe_cli.bench.gpu import gpu
from optpipe_cli.bench.milp import milp
from optpipe_cli.bench.pareto import pareto
from optpipe_cli.bench.protocol import protocol
from optpipe_cli.bench.published import published
from optpipe_cli.bench.reuse import reuse
from optpipe_cli.bench.runtime import runtime
from optpipe_cli.bench.scale import scale
from optpipe_cli.bench.service import service
from optpipe_cli.bench.solver import jitter, solver
from optpipe_cli.bench.table1 import table1
from optpipe_cli.options import register

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
register(app, milp, protocol, solver, jitter, pareto, gpu, runtime, service, core, first, costs, cache, reuse)
register(app, table1, published, figures, scale)  # of papers
