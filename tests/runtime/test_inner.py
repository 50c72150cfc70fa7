"""Stages that several ranks compute together, against the same model in one process: by torch's own parallel layers;
layers of tokens of one sequence, experts on different ranks, plain parameters of which each has a part, and parts that
are updated on the host.

Sums over the ranks of a group come in another order than in one process, so losses and gradients are compared with a
tolerance. Between two schedules of the same pipeline the arithmetic is the same, and gradients are equal to the bit.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases, inner, microbatches
from support.ranks.cases import LENGTH, WIDTH, WORDS, Gradients, Plain, batch, batches, plain_training, problem
from support.ranks.inner import Seen, make_stages, mesh, parallel, step_of, two_stages
from support.ranks.microbatches import Sizes, Turn, given
from support.ranks.optimizer import momentum
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.replicas import gradients, parameters
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import InputError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, PlannedSteps
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.ranks.gradients import placed


def train_packed(taken: Sequence[Turn], planned: bool) -> list[tuple[list[float], Gradients]]:
    """Losses and gradients, with a schedule for every step, or one that is loaded."""
    stage = dist.get_rank() // 2
    modules = {stage: parallel(make_stages()[stage], mesh()["tensor"])}
    optimizer, seen = cases.sgd(*modules.values()), []
    with (
        two_stages(modules, len(taken[0].sizes)) as pipe,
        PlannedSteps(pipe, activation_budget_bytes=10**9) if planned else nullcontext(pipe) as train,
    ):
        if not planned:
            pipe.load(one_at_a_time(pipe.layout.unmeasured()))
        for seed, turn in enumerate(taken):
            optimizer.zero_grad()
            losses = train.step(**given(turn, seed, [stage], stage, 2)).losses
            seen.append((losses or [], gradients(modules)))
            optimizer.step()
    return seen


def close(found: Gradients, expected: Gradients) -> None:
    """To float32's precision, in proportion to the largest gradient of all: a key's bias has none but rounding."""
    require_close(found, expected, atol=1e-6 * max(float(abs(grad).max()) for grad in expected.values()))


def test_tensor_parallel_stages_train_as_one_process(four_ranks: Ranks) -> None:
    """By every kind of schedule, through a swap; one for all peers, although each loads and offers its own."""
    programs = [ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED]
    ranks = four_ranks(inner.trained, microbatches=4, programs=programs, better=2)
    trained = len(ranks[0].versions)
    expected = inner.plain(4, 1 + trained)
    assert len({seen.problem for seen in ranks}) == 1
    assert all(seen.versions == ranks[0].versions and seen.schedule == "schedule 2" for seen in ranks)
    for k in range(4):
        for first, other in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
            for name, grad in first.steps[k].gradients.items():
                np.testing.assert_array_equal(grad, ranks[0 if first is ranks[0] else 2].steps[0].gradients[name])
                np.testing.assert_array_equal(grad, other.steps[k].gradients[name])
    for plain, k in zip(expected, (0, *range(4, 4 + trained)), strict=True):
        close(ranks[0].steps[k].gradients | ranks[2].steps[k].gradients, plain.gradients)
        for seen in ranks:
            assert seen.steps[k].norm == pytest.approx(plain.norm, rel=1e-5)
        assert ranks[2].steps[k].losses == pytest.approx(plain.losses, rel=1e-5)
    for seen in ranks:
        assert all(step.excess is None for step in seen.steps)
        assert [bool(step.host_peak_bytes) for step in seen.steps[:4]] == [False, False, True, False]
        assert seen.at_b <= {
            f"{layer}.{name}"
            for layer in ("0.norm1", "0.norm2", "1", "1.norm1", "1.norm2")
            for name in ("weight", "bias")
        }


@pytest.mark.parametrize("planned", [True, False])
def test_micro_batches_of_different_shapes_train_as_in_one_process(four_ranks: Ranks, planned: bool) -> None:
    """The sequence is divided by the peers, so lengths are even; planned steps have different numbers of them."""
    first = Turn((Sizes(2, 10), Sizes(1, 16), Sizes(3, 4), Sizes(2, 12)))
    longer = Turn((Sizes(1, 34), Sizes(2, 6), Sizes(1, 8), Sizes(2, 20)), weighted=True)
    turns = [first, longer, *([Turn((Sizes(1, 22), Sizes(2, 8)))] if planned else []), first]
    ranks = four_ranks(train_packed, taken=turns, planned=planned)
    for step, (losses, expected, _) in enumerate(microbatches.plain(make_stages(), turns)):
        for begins, ends in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):
            assert ends[step][0] == pytest.approx(losses, rel=1e-4)
            close(begins[step][1] | ends[step][1], expected)


def test_a_stage_that_communicates_with_ranks_not_named_is_refused(four_ranks: Ranks) -> None:
    """As is what names the wrong ranks. If one peer refuses a schedule, all refuse it."""
    inside = "communicates inside an op with ranks"
    for rank, told in enumerate(four_ranks(inner.refused)):
        peers = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert len(told) == 7
        assert f"{inside} {peers}, which all must run one schedule: give the Pipeline, as inner, " in told[0]
        assert told[1].startswith(f"stage {rank // 2}: Marked {inside} {peers}, which all")
        assert told[2].startswith(
            f"stage {rank // 2}: SyncBatchNorm {inside} [0, 1, 2, 3], of which inner has {peers}:"
        )
        assert told[3].startswith("inner: rank 0 gave a str: must be a DeviceMesh or a torch.distributed.ProcessGroup")
        assert told[4].startswith("inner: rank 0 has peers [0, 2], in pipelines [[0, 2]]: give `group` one rank of ")
        assert told[5].startswith("inner: rank 0 has peers [0, 1], in pipelines [[0, 1, 2, 3]]: give `group` one rank ")
        assert told[6].startswith("rank 1 (inner peer 1): host_memory_bytes = 1 kB: 0 B are allocated and ")


def test_copies_are_tied_part_by_part(four_ranks: Ranks) -> None:
    for found, norm, in_one_process, expected in four_ranks(inner.tied, programs=SPLIT):
        close(found, in_one_process)
        assert norm == pytest.approx(expected, rel=1e-5)


def test_a_mesh_of_two_dimensions(four_ranks: Ranks) -> None:
    (expected,) = inner.plain(4, 1)
    programs = [
        [f"{s}{kind}{j}" for j in range(4) for s, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B"), (1, "W"), (0, "W"))]
    ]
    for seen in four_ranks(inner.of_two_dimensions, programs=programs):
        close(seen.gradients, expected.gradients)
        assert seen.losses == pytest.approx(expected.losses, rel=1e-5)
        assert seen.norm == pytest.approx(expected.norm, rel=1e-5)


def test_a_profile_counts_local_parts_of_the_fullest_peer(four_ranks: Ranks) -> None:
    """Saved are the input, gathered to (2, 16, 32), and before and after GELU 65 of 129 columns, or 64."""
    inputs, most, least = (2 * 16 * columns * 4 for columns in (32, 65, 64))
    for found, at_b, _ in four_ranks(inner.measured):
        assert found == [inputs + 2 * most, inputs + 2 * least, 10**8]
        assert at_b == frozenset()


# Some begin a step before others have ended the one before

PATIENCE = timedelta(seconds=100)


class Begins(NamedTuple):
    """One step. `ahead`: the last stage's ranks begin it only when the first stage's have begun their first forward.
    `length`: of sequences. `evaluating`: only the second peer of the first stage has changed its mode."""

    ahead: bool = True
    length: int = LENGTH
    evaluating: bool = False


def data(step: int, how: Begins) -> tuple[Tensor, Tensor]:
    inputs, targets = (part[:, : how.length].contiguous() for part in batch(step, 4))
    return inputs, targets


def train_ahead(
    programs: Sequence[Sequence[str]], steps: Sequence[Begins]
) -> list[tuple[list[float] | None, Gradients]]:
    stage, peer = dist.get_rank() // 2, dist.get_rank() % 2
    module = parallel(make_stages()[stage], mesh()["tensor"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    store, now, found = dist.distributed_c10d._get_default_store(), [0], []

    def begun(*_: Any) -> None:
        if stage == 0:
            store.set(f"inner_ahead/{now[0]}/{peer}", "begun")

    hook = module.register_forward_pre_hook(begun)
    with two_stages({stage: module}, 4) as pipe:
        pipe.load(Schedule.parse(problem((0, 1), 4), programs))
        for step, how in enumerate(steps):
            now[0] = step
            optimizer.zero_grad()
            module.train(not (how.evaluating and (stage, peer) == (0, 1)))
            if how.ahead and stage == 1:
                store.wait([f"inner_ahead/{step}/{peer}"], PATIENCE)
            losses = pipe.step(*data(step, how)).losses
            found.append((losses, gradients({stage: module})))
            optimizer.step()
    hook.remove()
    for step in range(len(steps)) if stage == 0 else ():
        store.delete_key(f"inner_ahead/{step}/{peer}")
    return found


def test_no_rank_waits_for_others_than_its_peers_between_two_steps(four_ranks: Ranks) -> None:
    """The last stage begins a step when the first stage computes in it: did all meet before each step, this never
    ended. Where the batch of all ranks has another shape, or the module of one peer another mode, the step that has
    begun is undone, on all peers, and runs again."""
    steps = [
        Begins(ahead=False),
        Begins(),
        Begins(),
        Begins(ahead=False, length=LENGTH // 2),
        Begins(length=LENGTH // 2),
        Begins(ahead=False, length=LENGTH // 2, evaluating=True),
        Begins(ahead=False, length=LENGTH // 2),
        Begins(length=LENGTH // 2),
    ]
    ranks = four_ranks(train_ahead, programs=SPLIT, steps=steps)
    for step, plain in enumerate(plain_training(make_stages(), map(data, range(len(steps)), steps), 4)):
        largest = max(float(abs(gradient).max()) for gradient in plain.gradients.values())
        for first, last in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):
            assert last[step][0] == pytest.approx(plain.losses, rel=1e-4)
            require_close(first[step][1] | last[step][1], plain.gradients, rtol=1e-3, atol=1e-5 * largest)


# Tokens of one sequence, and experts: each rank has half of every sequence. The gradients of what all have are averaged
# over them, by DDP or `fully_shard`: a mean over the ranks is one over the whole sequence.

RANKS = 2


class Experts(nn.Module):
    """Every token goes to one expert, which another rank may have. How many go where differs in every micro-batch."""

    def __init__(self, ranks: DeviceMesh | None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, RANKS)
        self.experts = nn.Parameter(torch.randn(RANKS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.back = nn.Linear(4 * WIDTH, WIDTH)
        self.ranks = ranks
        if ranks is not None:
            own = self.experts.detach()[ranks.get_local_rank()].unsqueeze(0).clone()
            self.experts = nn.Parameter(DTensor.from_local(own, ranks, [Shard(0)]))
            self.experts.register_hook(lambda grad: grad / RANKS)  # a mean over the ranks, like the others' gradients

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).max(-1)
        order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=RANKS)
        sent = tokens[order]
        if self.ranks is None:
            found = torch.cat([part @ self.experts[e] for e, part in enumerate(sent.split(counts.tolist()))])
        else:
            group, coming = self.ranks.get_group(), torch.empty_like(counts)
            dist.all_to_all_single(coming, counts, group=group)
            out, back = counts.tolist(), coming.tolist()
            here = collectives.all_to_all_single_autograd(sent, back, out, group)
            assert isinstance(self.experts, DTensor)
            found = collectives.all_to_all_single_autograd(here @ self.experts.to_local()[0], out, back, group)
        mixed = torch.zeros_like(found).index_copy(0, order, functional.gelu(found)) * shares.unsqueeze(-1)
        return x + self.back(mixed).view(x.shape)


def of_tokens(_: DeviceMesh | None) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


KINDS = {"tokens": of_tokens, "experts": Experts}


def make_kind(kind: str, ranks: DeviceMesh | None = None) -> list[nn.Module]:
    torch.manual_seed(7)
    first = nn.Sequential(nn.Embedding(WORDS, WIDTH), KINDS[kind](ranks))
    return [first, nn.Sequential(KINDS[kind](ranks), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))]


def uneven(kind: str, microbatches: int) -> tuple[Tensor, Tensor]:
    """With experts each first gets half of the tokens of the first micro-batch, and one all of the last."""
    inputs, targets = batch(0, microbatches)
    if kind == "experts":
        embedding, experts = make_kind(kind)[0].children()
        words = experts.get_submodule("router")(embedding.weight).argmax(-1)
        of_first, of_second = ((words == e).nonzero().flatten().tolist() for e in range(RANKS))
        inputs[:RANKS, ::2], inputs[:RANKS, 1::2] = of_first[0], of_second[0]
        inputs[-RANKS:] = of_first[0]
    return inputs, targets


def plain(kind: str, microbatches: int) -> Plain:
    return plain_training(make_kind(kind), [uneven(kind, microbatches)], microbatches, max_norm=0.1)[0]


def trained(kind: str, microbatches: int, programs: Sequence[Sequence[Sequence[str]]]) -> list[Seen]:
    stage, peer, ranks = dist.get_rank() // 2, dist.get_rank() % 2, mesh()["tensor"]
    module: nn.Module = make_kind(kind, ranks)[stage]
    apart = {p for p in module.parameters() if isinstance(p, DTensor)}
    if apart:
        fully_shard(module, mesh=ranks, ignored_params=apart)
    else:
        module = DistributedDataParallel(module, process_group=ranks.get_group())
    given: list[Any] = [part.chunk(2, dim=1)[peer].contiguous() for part in uneven(kind, microbatches)]
    seen = []
    with two_stages({stage: module}, microbatches) as pipe:
        measured = pipe.profile(*given, activation_budget_bytes=10**9, repeats=1)
        for program in programs:
            pipe.load(Schedule.parse(measured, program))
            seen.append(step_of(pipe, {stage: module}, given)[0])
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_other_collectives_inside_a_stage(four_ranks: Ranks, kind: str) -> None:
    """Of a wrapper, and of experts, whose activations differ from micro-batch to micro-batch: what a step holds more
    than the profile found is reported, and changes no gradient."""
    programs = [SPLIT, OFFLOADED, RECOMPUTED]
    ranks = four_ranks(trained, kind=kind, microbatches=4, programs=programs)
    expected = plain(kind, 4)
    for k in range(len(programs)):
        first, last = ranks[0][k], ranks[2][k]
        require_close(first.gradients | last.gradients, expected.gradients)
        assert np.mean([last.losses, ranks[3][k].losses], axis=0) == pytest.approx(expected.losses, rel=1e-5)
        for seen in ranks:
            assert seen[k].norm == pytest.approx(expected.norm, rel=1e-5)
            for name, grad in seen[k].gradients.items():
                np.testing.assert_array_equal(grad, seen[0].gradients[name], err_msg=name)
    assert all(seen[1].host_peak_bytes for seen in ranks)
    assert bool(ranks[0][0].excess) == (kind == "experts")  # the first stage's first expert gets more than ever before


# Plain parameters


class Sliced(nn.Module):
    """A linear layer of which each rank has some of the outputs, as Megatron-LM's, by plain parameters."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup, marked: bool) -> None:
        super().__init__()
        self.group, (size, rank) = group, (group.size(), group.rank())
        self.weight = nn.Parameter(whole.weight.detach().chunk(size)[rank].clone())
        self.weight.tensor_model_parallel = marked  # type: ignore[attr-defined]
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = AllReduceBackward.apply(x, self.group)  # type: ignore[no-untyped-call]
        y: Tensor = Gather.apply(functional.linear(x, self.weight), self.group)  # type: ignore[no-untyped-call]
        return y + self.bias


class AllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dy = dy.contiguous()
        dist.all_reduce(dy, group=ctx.group)
        return dy, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(y) for _ in range(group.size())]
        dist.all_gather(parts, y.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None


def plain_parts(marked: bool, validated: bool) -> tuple[Any, float]:
    """A step on stages of plain parameters, of which each peer has a part: the norm that clipping saw, or why it did
    not; and that of one process. `validated`: by `post_validate`."""
    stage, m = dist.get_rank() // 2, 4
    torch.manual_seed(0)
    whole = [nn.Linear(8, 8), nn.Linear(8, 8)]
    inputs, targets = torch.randn(2, 2 * m, 8)
    pipe, tensor = mesh()["pipe"], mesh()["tensor"].get_group()
    module = Sliced(whole[stage], tensor, marked)
    with Pipeline({stage: module}, [0, 1], functional.mse_loss, m, group=pipe.get_group(), inner=tensor) as pipeline:
        pipeline.load(Schedule.parse(problem((0, 1), m), SPLIT))
        pipeline.step(inputs, targets)
        try:
            if validated:
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
                pipeline.post_validate(optimizer, 0.1)
                optimizer.step()
                found: Any = pipeline.step(inputs, targets).grad_norm
            else:
                found = pipeline.clip_grad_norm_(0.1)
        except InputError as error:
            found = str(error)
    functional.mse_loss(whole[1](whole[0](inputs)), targets).backward()  # type: ignore[no-untyped-call]
    return found, nn.utils.clip_grad_norm_([p for layer in whole for p in layer.parameters()], 0.1).item()


@pytest.mark.parametrize("validated", [False, True])
def test_the_norm_counts_plain_parameters_once_or_as_parts(four_ranks: Ranks, validated: bool) -> None:
    """Parts must be marked: else their gradients differ between peers, and clipping is refused."""
    for found, expected in four_ranks(plain_parts, marked=True, validated=validated):
        assert found == pytest.approx(expected, rel=1e-5)
    for complaint, _ in four_ranks(plain_parts, marked=False, validated=validated):
        assert complaint.startswith("stage 0: weight has gradients of norms 0.271, 0.265 on its inner peers: average ")


# Optimizers on the host


class Ran(NamedTuple):
    losses: list[list[float] | None]
    norms: list[float]
    parameters: Gradients


def updated(programs: Sequence[Sequence[str]], hosted: bool, max_norm: float, steps: int) -> Ran:
    stage, m = dist.get_rank() // 2, 4
    module = parallel(make_stages()[stage], mesh()["tensor"])
    here = momentum([torch.zeros(0)] if hosted else list(module.named_parameters()))
    hosts: dict[str, Any] = {"host_optimizers": dict.fromkeys((0, 1), momentum), "clip_host_updates": max_norm > 0}
    ran = Ran([], [], {})
    with two_stages({stage: module}, m, **(hosts if hosted else {})) as pipe:
        pipe.load(Schedule.parse(problem((0, 1), m), programs))
        for step in range(steps):
            here.zero_grad()
            ran.losses.append(pipe.step(*batch(step, m)).losses)
            if max_norm:
                ran.norms.append(pipe.clip_grad_norm_(max_norm))
            for parameter in module.parameters() if not hosted else ():
                parameter.grad = placed(parameter)  # torch may leave partial sums, which an optimizer rounds otherwise
            here.step()
        pipe.synchronize()
    return ran._replace(parameters=parameters({stage: module}))


@pytest.mark.parametrize("max_norm", [0.0, 0.2])
def test_tensor_parallel_stages_are_updated_on_the_host_as_on_the_device(four_ranks: Ranks, max_norm: float) -> None:
    """To the bit; where they are clipped, to the rounding of the norm of all parts."""
    found, expected = (
        four_ranks(updated, programs=SPLIT, hosted=hosted, max_norm=max_norm, steps=3) for hosted in (True, False)
    )
    for ran, on_device in zip(found, expected, strict=True):
        if ran.losses[0] is not None:
            np.testing.assert_allclose(ran.losses, on_device.losses, rtol=1e-5 if max_norm else 0)
        assert ran.norms == pytest.approx(on_device.norms, rel=1e-6)
        rtol, atol = (1e-4, 1e-5) if max_norm else (0, 0)
        require_close(ran.parameters, on_device.parameters, rtol, atol)
    if max_norm:
        modules = make_stages()
        optimizer = momentum([p for module in modules for p in module.parameters()])
        norms = [step.norm for step in plain_training(modules, batches(3, 4), 4, optimizer, max_norm=max_norm)]
        assert min(norms) > max_norm, "each update is clipped"
        for ran in found:
            assert ran.norms == pytest.approx(norms, rel=1e-4)
