"""`python -m benchmarks NAME`, from the folder of the repository. Only the module of that name is imported."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple

from cyclopts import App

from optpipe_cli.app import new_app
from optpipe_cli.main import run


class Benchmark(NamedTuple):
    module: str
    measures: str


BENCHMARKS = {
    "core": Benchmark("speed", "how long simulate, certify and check take"),
    "first": Benchmark("speed", "how soon there is a first schedule"),
    "solver": Benchmark("solver", "what solve reaches, and when"),
    "builds": Benchmark("builds", "two builds side by side: what their searches reach"),
    "pareto": Benchmark("pareto", "memory against makespan, of everything published and of the solver"),
    "milp": Benchmark("milp", "what each step of the paper's MILP is worth"),
    "gaps": Benchmark("milp", "how soon two builds' MILPs, or kinds of triangle cuts, close a gap"),
    "scale": Benchmark("scale", "how the cost of a search grows with the pipeline"),
    "cache": Benchmark("cache", "what a fresh install finds of ordinary problems"),
    "reuse": Benchmark("reuse", "how good a cached schedule is for a similar problem"),
    "levels": Benchmark("levels", "what several levels of recomputation are worth"),
    "steps": Benchmark("steps", "how soon each step has a schedule, and how good it is"),
    "costs": Benchmark("papers.costs", "the cost model against published figures"),
    "predictions": Benchmark("predictions", "measured iterations, predicted by the cost model"),
    "plans": Benchmark("plans", "Megatron-Bridge's own divisions beside those that a plan chooses"),
    "table1": Benchmark("papers.table1", "OptPipe's Table 1: predicted, and solved"),
    "published": Benchmark("papers.published", "measurements of others, predicted"),
    "traces": Benchmark("traces", "public traces of real jobs, replayed and improved"),
    "corpus": Benchmark("corpus", "public traces of real jobs: what they lose, why, and the cure"),
    "figures": Benchmark("papers.figures", "OptPipe's Figure 6, by simulation and search"),
    "pipeoffload": Benchmark("papers.pipeoffload", "PipeOffload's figures, by the cost model and simulation"),
    "chronos": Benchmark("papers.chronos", "ChronosPipe's figures, by theory, the cost model and simulation"),
    "bpipe": Benchmark("papers.bpipe", "BPipe's claim for GPT-3 96B and 134B, by the cost model"),
    "fidelity": Benchmark("training.fidelity", "steps and memory on ranks of this machine, beside their predictions"),
    "executor": Benchmark("training.executor", "steps in a row, and what the executor costs the host"),
    "gpu": Benchmark("gpu.command", "what offloading costs on one GPU, and how good predictions are"),
    "links": Benchmark("gpu.links", "six ways in which two GPUs on one PCIe switch copy to the host and back"),
    "service": Benchmark("service.command", "the service under load and after failures"),
}


def load(name: str) -> App:
    """The program that is one benchmark."""
    app = new_app(name)
    app.default(getattr(import_module(f"benchmarks.{BENCHMARKS[name].module}"), name))
    return app


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name in BENCHMARKS:
        run(lambda: load(name), f"python -m benchmarks {name}")
    print("python -m benchmarks NAME, with --help or options behind it; NAME is one of")
    for each, benchmark in BENCHMARKS.items():
        print(f"  {each:13} {benchmark.measures}")
    sys.exit(0 if name == "--help" else 2)


if __name__ == "__main__":
    main()
