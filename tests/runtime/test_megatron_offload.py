"""Megatron-core's own offload (0.19.2): its manager, on a CPU with its CUDA calls replaced, copies out and back what
our schedules of its policy have, in the same order, and counts the same bytes. That measures nothing of a GPU.

`make stacks` runs it in an environment with the package.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.units import units

from optpipe import InputError
from optpipe.formats import megatron
from optpipe.model.ops import Kind, Op
from optpipe.transformer.estimate import estimate
from optpipe.transformer.offload import AROUND, Group
from optpipe.transformer.presets import GPUS, MODELS
from optpipe.transformer.records import Parallelism, Run
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.planner.offload import choices
from optpipe_solver.systems.megatron_offload import Chunk, offloading, staying

pytestmark = [pytest.mark.stacks, pytest.mark.filterwarnings("ignore")]
NUMBERS = 16  # of a tensor, in 32 bits: as many as are offloaded
Layers = Sequence[Sequence[int]]  # of a chunk: of each module of a layer the tensors that it saves, some perhaps 0
Event = tuple[str, tuple[int, int], int]  # what is done with the group of this number of a chunk and micro-batch


class Idle:
    """A stream or an event where all is over at once."""

    def __init__(self, **_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture(scope="module")
def offload() -> Iterator[Any]:
    """Megatron's module, with a CPU for its GPU."""
    module = pytest.importorskip("megatron.core.pipeline_parallel.fine_grained_activation_offload")
    if not hasattr(module, "OffloadTensorPool"):
        pytest.skip("megatron-core 0.16.1 has no fractions")
    import torch

    engine, pool = ModuleType("megatron.core.extensions.transformer_engine"), module.OffloadTensorPool
    engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)  # type: ignore[attr-defined]
    with ExitStack() as patches:
        for target, name, value in (
            (torch.cuda, "Stream", Idle),
            (torch.cuda, "Event", Idle),
            (torch.cuda, "current_stream", Idle),
            (torch.cuda, "stream", lambda _: nullcontext()),
            (torch.Tensor, "record_stream", lambda *_: None),
            (module, "is_graph_capturing", lambda: False),
            (module, "nvtx_range_push", lambda _: None),
            (module, "nvtx_range_pop", lambda _: None),
            (module, "print_offload_summary_table", lambda _: None),
            (module, "OffloadTensorPool", lambda **_: pool("cpu")),
            (module.ChunkOffloadHandler, "_can_manage_tensor_for_offload", staticmethod(torch.is_tensor)),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        patches.enter_context(mock.patch.dict("sys.modules", {engine.__name__: engine}))
        yield module


def second_step(
    module: Any, order: Sequence[Op], rank: int, p: int, saved: Sequence[Layers], names: Sequence[str], *knobs: float
) -> Any:
    """What the manager does in its second step, forwards and backwards of whole chunks among it; and its summary."""
    import torch

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            return x + 0

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            return grad, *[None for _ in ctx.saved_tensors]

    done = list[Event]()
    handlers, interface = module.ChunkOffloadHandler, module.FineGrainedActivationOffloadingInterface
    real = handlers.bulk_offload_group, handlers.bulk_reload_group, handlers.tensor_pop

    def leave(handler: Any, group: Any) -> None:
        done.append(("O", handler.visit, handler.offload_groups.index(group)))
        real[0](handler, group)

    def come_back(handler: Any) -> None:
        group = handler._groups_to_reload[-1]
        if any(isinstance(state, tuple) for state in group._tensors.values()):
            done.append(("R", handler.visit, handler.offload_groups.index(group)))
        real[1](handler)

    def take(handler: Any, tag: Any) -> Any:
        if isinstance(handler.offload_groups[tag[0] - 1]._tensors[tag], tuple):  # nobody has reloaded it
            done.append(("R", handler.visit, tag[0] - 1))
        return real[2](handler, tag)

    module.PipelineOffloadManager.reset_instance()
    manager = module.PipelineOffloadManager.get_instance()
    fraction, delta = knobs
    with mock.patch.multiple(handlers, bulk_offload_group=leave, bulk_reload_group=come_back, tensor_pop=take):
        for step in range(3):
            interface.reset()
            done[:] = [] if step < 2 else done
            outputs = dict[Any, Any]()
            for kind, chunk, j, _ in order if step < 2 else ():
                visit = chunk, j
                done.append((kind.name, visit, 0))
                if kind is Kind.BW:
                    outputs.pop(visit).sum().backward()
                    continue
                interface.init_chunk_handler(rank, len(saved) // p, chunk // p, NUMBERS, delta, fraction)
                if step == 0:
                    manager._cur_forward_chunk.visit = visit
                x = torch.ones(1, requires_grad=True)
                for layer in saved[chunk]:
                    around = None
                    for name, count in zip(names, layer, strict=True):
                        scope = interface(True, x, name)
                        with scope as x:
                            x = Save.apply(x, *[torch.ones(NUMBERS) for _ in range(count)])
                        if name in AROUND:
                            around = scope
                        else:
                            x = scope.group_offload(x)
                    x = around.group_offload(x) if around else x
                outputs[visit] = x
    return done, manager.offload_summary_total_bytes


@settings(deadline=None, max_examples=examples(100))
@given(data=st.data())
def test_the_manager_copies_what_our_schedule_does(offload: Any, data: st.DataObject) -> None:
    p, v = data.draw(st.integers(1, 3), "ranks"), data.draw(st.integers(1, 3), "chunks")
    v = v if p > 1 else 1
    m = data.draw(st.integers(2, 6), "micro-batches") * (p if v > 1 else 1)
    names = data.draw(
        st.sampled_from([["core_attn"], ["qkv_linear", "core_attn"], ["attn_norm", "core_attn"]]), "names"
    )
    modules = len(names)
    layer = st.lists(st.integers(0, 2), min_size=modules, max_size=modules)
    saved = [data.draw(st.lists(layer, min_size=1, max_size=3), f"chunk {c}") for c in range(p * v)]
    fraction = data.draw(st.sampled_from([1.0, 0.75, 0.5, 0.3, 0.0]), "fraction")
    delta = data.draw(st.integers(0, 3), "delta") * 4 * NUMBERS
    first = [sum(map(len, saved[:c])) for c in range(p * v)]  # the number of a chunk's first layer
    groups = [
        [Group(name, 4 * NUMBERS * count, 4 * NUMBERS * count) for name, count in zip(names, each, strict=True)]
        for chunk in saved
        for each in chunk
    ]
    plain = units(p, m, offload_ms=0.1, reload_ms=0.1, offload_bytes=1)
    stages = [plain.stages[c % p] for c, chunk in enumerate(saved) for _ in chunk]
    problem = plain.replace(stages=stages, transfer_mode="full_duplex")
    orders = megatron.order(p, v, megatron.in_groups(m, p if v > 1 else 1))
    try:
        schedule = offloading(problem, groups, 1e-3, fraction, delta)
    except InputError:  # what it is about is true
        with pytest.raises(AssertionError, match="Chunk mismatch"):
            [second_step(offload, order, r, p, saved, names, fraction, delta) for r, order in enumerate(orders)]
        return
    for r, order in enumerate(orders):
        done, summary = second_step(offload, order, r, p, saved, names, fraction, delta)
        visits: list[tuple[Op, set[tuple[str, int, int]]]] = []
        seen = set[tuple[str, int, int]]()
        for kind, (chunk, j), n in done:
            if kind in ("F", "BW"):
                visits.append((Op(Kind[kind], chunk, j), set()))
            elif (
                saved[chunk][n // modules][n % modules]
                and (event := (kind, first[chunk] + n // modules, j)) not in seen
            ):
                seen.add(event)  # with the first of its modules a layer begins to come back
                visits[-1][1].add(event)
        ours = schedule.programs[r].ops()
        back = [("R", first[c] + n // modules, j) for kind, (c, j), n in done if kind == "R"]
        assert [*dict.fromkeys(back)] == [("R", s, j) for kind, s, j, _ in ours if kind is Kind.R]
        by_visit = [*in_visits(ours, first)]
        if modules == 1:  # what the end of a chunk's backward reloads stands before the next one
            visits, by_visit = (
                [(op, {each for each in sets if each[0] == "O"}) for op, sets in of] for of in (visits, by_visit)
            )
        assert visits == by_visit
        assert summary == leaving(saved, groups, order, r, p, fraction, delta)


@pytest.mark.parametrize("name", ["llama-2-70b", "deepseek-v3"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_config_takes_every_setting_that_a_plan_may_choose(name: str, recompute: str, offload: Any) -> None:
    from megatron.core.transformer import TransformerConfig

    run = Run(microbatches=4, sequence=4096, recompute=recompute)
    made = estimate(MODELS[name], Parallelism(), GPUS["GB200"], run)
    settings_tried = choices(Candidate(made))
    modules_tried = {module for modules, _, _ in settings_tried for module in modules}
    attention = {"core_attn", "attn_proj"} if recompute == "none" else set()
    others = {"qkv_linear"} | ({"attn_norm", "mlp_norm", "expert_fc1", "moe_act"} if made.shape.experts else set())
    assert modules_tried == attention | others
    for modules, fraction, _ in settings_tried:
        config = TransformerConfig(
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            recompute_granularity="selective" if recompute == "selective" else None,
            fine_grained_activation_offloading=True,
            offload_modules=[*modules],
            activation_offload_fraction=fraction,
        )
        assert config.offload_modules == [*modules]
    with pytest.raises(ValueError, match="attn_proj cannot be set to offload_modules alone"):
        TransformerConfig(
            num_layers=4,
            hidden_size=64,
            num_attention_heads=4,
            fine_grained_activation_offloading=True,
            offload_modules=["attn_proj"],
        )


def in_visits(ops: Sequence[Op], first: Sequence[int]) -> Iterator[tuple[Op, set[tuple[str, int, int]]]]:
    """Forwards and backwards of whole chunks, each with the layers and micro-batches copied out or back from it on."""
    visit, copied, reloaded = None, set[tuple[str, int, int]](), set[tuple[str, int, int]]()
    for kind, stage, j, _ in ops:
        if kind in (Kind.F, Kind.BW):
            here = Op(kind, bisect(first, stage) - 1, j)
            if visit and here != visit:
                yield visit, copied
                copied = set()
            visit, copied, reloaded = here, copied | reloaded, set()
        elif kind is Kind.O:
            copied.add(("O", stage, j))
        elif kind is Kind.R:
            reloaded.add(("R", stage, j))
    assert visit
    yield visit, copied | reloaded


def leaving(saved: Sequence[Layers], groups: Any, order: Sequence[Op], r: int, p: int, *knobs: float) -> float:
    """The bytes of the groups that leave before the first backward has begun, its own chunk included."""
    backward, layer, chunks = [(op.stage, op.microbatch) for op in order if op.kind is Kind.BW], 0, {}
    for c, chunk in enumerate(saved):
        stages = range(layer, layer := layer + len(chunk))
        if c % p == r:
            chunks[c] = Chunk(stages, [(s, group) for s in stages for group in groups[s]])
    fraction, delta = knobs
    stays, total = staying(chunks, backward, fraction, r * delta), 0.0
    for op in order:
        visit = op.stage, op.microbatch
        total += sum(g.copied for (_, g), stay in zip(chunks[op.stage].saved, stays[visit], strict=True) if not stay)
        if visit == backward[0]:
            break
    return total
