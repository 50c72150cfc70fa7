"""`optpipe model`: from a transformer's shape to a problem file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from optpipe.errors import InputError
from optpipe.files import parse_json, read_file
from optpipe.model.problem import offload_ratio
from optpipe.transformer.estimate import FRAGMENTS, FRAGMENTS_DEVIATION, Estimate, estimate
from optpipe.transformer.gpu import Gpu
from optpipe.transformer.huggingface import read
from optpipe.transformer.presets import GPUS, MODELS, preset
from optpipe.transformer.records import Parallelism, Run, RunOptions, Transformer
from optpipe_cli.compare import best_published
from optpipe_cli.options import Flag, Json, Options, Output
from optpipe_cli.output import echo, print_json
from optpipe_solver.bounds.least_memory import infeasibility

GB = 1e9
MOST_GB = 1_000_000  # of a GPU's host memory
HELD = {"weights": 10, "gradients": 11, "optimizer": 11, "workspace": 11, "reserved": 10, "for activations": 17}
COSTS = {"device": 8, "layers": 8, "F ms": 9, "B ms": 9, "W ms": 9, "activation GB": 15, "until W GB": 12, "k": 7}


def model(
    name: Annotated[str | None, Parameter(help="A preset, a config.json, or a file with a shape's fields.")] = None,
    /,
    *,
    gpu: Annotated[str, Parameter(help="A preset, or a file with a data sheet's fields.")] = "H100",
    division: Annotated[Options[Parallelism], Parameter(group="Division over GPUs")] = Parallelism(),
    microbatches: Annotated[int | None, Parameter(help="Micro-batches a step. Default: four times pp.")] = None,
    run: Annotated[Options[RunOptions], Parameter(group="What runs")] = RunOptions(),
    host_memory_gb: Annotated[float | None, Parameter(help="Pinned host memory of each GPU.")] = None,
    presets: Annotated[Flag, Parameter(help="List models and GPUs with their sources.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """`optpipe model`."""
    if presets:
        sources = {"models": {n: m.source for n, m in MODELS.items()}, "gpus": {n: g.source for n, g in GPUS.items()}}
        if json:
            print_json(sources)
        for title, entries in sources.items() if not json else ():
            echo(title)
            for preset_name, source in entries.items():
                echo(f"  {preset_name:18} {source}")
        return
    if name is None:
        raise InputError("NAME is missing: a preset, which --presets lists, or a config.json")
    whole = {
        "microbatches": 4 * division.pp if microbatches is None else microbatches,
        "host_memory_bytes": host_bytes(host_memory_gb),
        **run.model_dump(),
    }
    shape = read_model(name)
    require_use(shape, run.overlap, run.model_fields_set)
    answer = estimate(shape, division, read_gpu(gpu), Run.from_dict(whole, "model"))
    if json:
        print_json(figures(answer))
    else:
        for line in lines(answer):
            echo(line)
    if not json and (reason := infeasibility(answer.problem)):
        fits = "; ".join(what_fits(answer))
        echo(f"note: no schedule fits: {reason}{f'; what fits: {fits}' if fits else ''}", err=True)
    if output:
        answer.problem.save(output)
        if not json:
            echo(f"written to {output}")


def require_use(shape: Transformer, overlap: str | None, chosen: Iterable[str]) -> None:
    """Raises InputError for a chosen option that changes nothing, as it is about experts and there are none."""
    of_experts = {"dispatch", "expert_load", "fused_experts"} & {*chosen}
    if not shape.experts and (options := [*sorted(of_experts), *["overlap experts"] * (overlap == "experts")]):
        name = shape.name or "the model"
        raise InputError(f"--{options[0].replace('_', '-')}: would change nothing, as {name} has no experts")


def what_fits(answer: Estimate) -> Iterator[str]:
    """The options with which some schedule fits, each with the shortest published one, on any stages."""
    division, run = answer.parallelism, answer.run
    changes: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
        f"--recompute {level}": ({}, {"recompute": level}) for level in ("selective", "cheap", "full")
    }
    if run.microbatch_size % 2 == 0:
        halved = {"microbatch_size": run.microbatch_size // 2, "microbatches": 2 * run.microbatches}
        changes[f"--microbatch-size {halved['microbatch_size']} --microbatches {halved['microbatches']}"] = {}, halved
    changes[f"--tp {2 * division.tp} on twice the GPUs"] = {"tp": 2 * division.tp}, {}
    for name, (other_division, other_run) in changes.items():
        with suppress(InputError):
            asked = division.model_copy(update=other_division), answer.gpu, run.model_copy(update=other_run)
            problem = estimate(answer.shape, *asked).problem
            best = best_published(problem, "all", "makespan")
            if best or not infeasibility(problem):
                yield f"{name} ({best.makespan_ms:.6g} ms by {best.method})" if best else name


def lines(estimate: Estimate) -> Iterator[str]:
    """What the estimate assumes and finds, in words and two tables. The second one needs a problem that fits."""
    shape, parallelism, gpu, run = estimate.shape, estimate.parallelism, estimate.gpu, estimate.run
    names = ("pp", "tp", "cp", "ep", *(["etp"] if parallelism.etp else []), "dp", "zero", "chunks")
    division = ", ".join(f"{name} {getattr(parallelism, name)}" for name in names)
    yield f"{shape.name or 'model'}: {estimate.parameters / GB:.2f} billion parameters, {shape.layers} layers"
    yield f"  from {shape.source or 'a file'}"
    yield from left_out(shape, run.mtp)
    yield f"{parallelism.gpus} × {gpu.name or 'GPU'}: {division}"
    yield f"  from {gpu.source or 'a file'}"
    yield (
        f"{run.microbatches} micro-batches of {run.microbatch_size} × {estimate.sequence} tokens; {run.precision}, "
        f"{run.attention} attention, recompute {run.recompute}"
    )
    if options := "; ".join(counted(estimate)):
        yield f"  counted: {options}"
    yield assumed(estimate)
    yield f"if no device waited, MFU would be {estimate.utilization:.1%}: that is these figures, not a measurement"
    yield ""
    held = ((m.weights, m.gradients, m.optimizer, m.workspace, m.reserved, m.budget) for m in estimate.devices)
    yield from table("GB", HELD, "device", ((nbytes / GB for nbytes in each) for each in held))
    problem = estimate.problem
    full = (gpu.memory_bytes - gpu.reserved_bytes) / GB
    yield (
        f"with its whole budget a device allocates {full:.2f} GB; torch's allocator reserves {FRAGMENTS:.0%} more (± "
        f"{FRAGMENTS_DEVIATION:.0%}), {FRAGMENTS * full:.2f} GB of what is reserved"
    )
    yield ""
    yield f"{'':>9}" + "".join(f"{title:>{width}}" for title, width in COSTS.items())
    saved, waiting = problem.costs.activation, problem.costs.saved_for_weight
    for s, (stage, pieces, k) in enumerate(zip(problem.stages, estimate.stages, offload_ratio(problem), strict=True)):
        yield (
            f"{f'stage {s}':>9}{stage.device:>8}{sum(estimate.pieces[i].is_layer for i in pieces):>8}"
            f"{stage.forward_ms:9.2f}{stage.backward_input_ms:9.2f}{stage.backward_weight_ms:9.2f}"
            f"{saved[s, 0] / GB:15.3f}{waiting[s, 0] / GB:12.3f}{k or 0.0:7.2f}"
        )
    yield f"a message between stages takes {problem.p2p_ms:.3f} ms"
    if problem.overlap_factor is not None:
        shares = problem.least_factors[0]
        yield f"a forward beside a backward takes {shares.min():.0%} to {shares.max():.0%} of both in turn, at least"
    yield f"where PCIe carries messages, too, all copies take up to {estimate.messages_beside_copies:.1%} longer"
    if ratios := [k for k in offload_ratio(problem) if k is not None]:
        most = max(ratios)
        share = "everything" if most <= 1 else f"{1 / most:.0%} of the activations of the stage with this k"
        yield f"k is up to {most:.2f}: there is time to offload {share}"


def left_out(shape: Transformer, mtp: int) -> Iterator[str]:
    """A line about the parts that are not modelled, if there are any; so many prediction modules are."""
    modules = shape.mtp_modules
    of = f"{modules - mtp} of {modules} multi-token prediction modules (--mtp {modules} counts all)"
    if parts := [*shape.left_out, *[of] * (modules > mtp)]:
        yield f"  not modelled: {'; '.join(parts)}"


def counted(estimate: Estimate) -> Iterator[str]:
    """What is not as in a usual transformer, or its training."""
    shape, run, head_parts = estimate.shape, estimate.run, estimate.parallelism.head_parts
    if shape.parts:
        kinds = ", ".join(f"{count} {parts}" for parts, count in Counter(shape.parts).items())
        yield f"layers {kinds} (M a state space, * attention, - an MLP, E experts)"
    if run.mtp:
        yield f"{run.mtp} multi-token prediction module{'s' * (run.mtp > 1)}, each with a layer and the head again"
    if run.lora:
        yield f"adapters of rank {run.lora}, which alone are trained"
    if head_parts > 1:
        yield f"the head in {head_parts} parts, which only OptPipe's runtime has"
    if run.fused_experts and shape.experts:
        yield "one kernel for all experts"
    if factor := run.moe_expert_capacity_factor:
        most = "exactly" if run.moe_pad_expert_input_to_capacity else "at most"
        yield f"experts take {most} {factor:g} times the mean of tokens"


def assumed(estimate: Estimate) -> str:
    """The parameters that times follow from."""
    gpu, precision = estimate.gpu, estimate.run.precision
    return (
        f"{'assumed' if gpu.covariance is None else 'learned'}: matmuls reach {gpu.fraction(precision):.0%} of "
        f"{estimate.clock.peak(precision) / 1e12:.0f} TFLOP/s, half of that at depth {gpu.matmul_depth:.0f}, attention "
        f"{gpu.attention_fraction:.0%}, memory {gpu.memory_fraction:.0%}, links {gpu.link_fraction:.0%}, the network "
        f"{gpu.network_fraction:.0%}, the host link {gpu.host_fraction:.0%}; the host "
        f"effectively {gpu.host_us:.0f} µs a kernel, waits included; a step of a collective {gpu.link_us:.1f} µs"
    )


def table(unit: str, columns: Mapping[str, int], name: str, rows: Iterable[Iterable[float]]) -> Iterator[str]:
    """Lines of figures, numbered; `columns` are titles and widths."""
    yield f"{unit:>9}" + "".join(f"{title:>{width}}" for title, width in columns.items())
    for number, row in enumerate(rows):
        cells = zip(row, columns.values(), strict=True)
        yield f"{f'{name} {number}':>9}" + "".join(f"{value:{width}.2f}" for value, width in cells)


def figures(estimate: Estimate) -> dict[str, Any]:
    """The same as `lines`, for programs."""
    return {
        "model": estimate.shape.model_dump(mode="json"),
        "parallelism": estimate.parallelism.model_dump(mode="json"),
        "gpu": estimate.gpu.model_dump(mode="json"),
        "run": estimate.run.model_dump(mode="json"),
        "parameters": estimate.parameters,
        "mfu_without_waiting": estimate.utilization,
        "devices": [vars(memory) for memory in estimate.devices],
        "messages_beside_copies": estimate.messages_beside_copies,
        "k": [k or 0.0 for k in offload_ratio(estimate.problem)],
        "problem": estimate.problem.to_dict(),
    }


def host_bytes(host_memory_gb: float | None) -> int | None:
    """The bytes of `--host-memory-gb`. Raises InputError if they cannot be a size."""
    if host_memory_gb is None:
        return None
    if not 0 <= host_memory_gb <= MOST_GB:  # not a number is in no range
        raise InputError(f"--host-memory-gb = {host_memory_gb:g}: a number of GB from 0 to {MOST_GB:,} was expected")
    return round(host_memory_gb * GB)


def read_model(name: str) -> Transformer:
    """The preset, the Hugging Face config, or the shape that a file has."""
    path = Path(name)
    if name in MODELS or not path.exists():
        return preset(MODELS, "model", name)
    text = read_file(path)
    content = parse_json(text, name)
    has_a_shape = isinstance(content, dict) and not {"model_type", "text_config"} & content.keys()
    return Transformer.from_dict({"name": path.stem, **content}, name) if has_a_shape else read(text, name)


def read_gpu(name: str) -> Gpu:
    """The preset, or the data sheet that a file has."""
    path = Path(name)
    return preset(GPUS, "gpu", name) if name in GPUS or not path.exists() else Gpu.from_json(read_file(path), name)
