"""Each of torch's private names that the runtime uses still means what it is used for. What is behind `fsdp` and
`pipelining` is tested by what uses them, on ranks; here only that the names are there."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Event
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import _CachingTorchDispatchMode, checkpoint, create_selective_checkpoint_contexts

from optpipe_runtime.torch_private import checkpoints, fsdp, groups, pipelining, tensors

aten = torch.ops.aten
TIMEOUT = timedelta(seconds=77)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def spread() -> DTensor:
    return DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])


def hooked(kind: str) -> nn.Parameter:
    hooked = parameter(2)
    getattr(hooked, kind)(lambda _: None)
    return hooked


def mapped() -> list[bool]:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(tensors.is_mapping())
        return x

    torch.vmap(note)(torch.ones(2))
    return seen


def in_force() -> Any:
    with saved_tensors_hooks(hash, abs):
        return tensors.saved_tensors_hooks_in_force()


class Calling(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("is called")


def without() -> Tensor:
    with tensors.without_subclass_functions():
        return torch.ones(2).as_subclass(Calling) + 1


def with_hook() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


def of_compiled(compiled: nn.Module, plain: nn.Module) -> bool:
    return tensors.is_compiled(compiled) and not tensors.is_compiled(plain)


def in_place(layer: nn.Module) -> nn.Module:
    layer.compile(backend="eager")
    return layer


@torch.compile(backend="eager", fullgraph=True)
def unbroken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def breaking() -> bool:
    try:
        unbroken(torch.ones(2))
    except Exception as error:
        return tensors.must_stay_whole(error) and not tensors.must_stay_whole(ValueError())
    return False


def checkpointed(x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [aten.mm.default])
    product: Tensor = checkpoint(lambda x: x @ x + 1, x, use_reentrant=False, context_fn=contexts)
    return product


def keeping_products() -> bool:
    with checkpoints.selective_checkpoints() as kept:
        product = checkpointed(LEAF)
    return [tensor.shape for tensor in kept()] == [product.shape]


def with_timeout() -> timedelta:
    options = dist.ProcessGroupGloo._Options()
    groups.set_timeout(options, TIMEOUT)
    return options._timeout


LAYER = nn.Linear(2, 2)
X, LEAF = torch.ones(2, 2), parameter(2, 2)

HOLDS: dict[ModuleType, dict[str, Callable[[], bool]]] = {
    tensors: {
        "makes_new": lambda: (
            [tensors.makes_new(op) for op in (aten.mm.default, aten.mm.out, aten.t.default, aten.relu_.default)]
            == [True, False, False, False]
        ),
        "written": lambda: (
            list(tensors.written(aten.mm.out, (X, X), {"out": LEAF})) == [LEAF]
            and list(tensors.written(aten.add_.Tensor, (LEAF, X), {})) == [LEAF]
            and not list(tensors.written(aten.mm.default, (X, X), {}))
        ),
        "GROUPED_MM": lambda: tensors.GROUPED_MM is None or callable(tensors.GROUPED_MM),
        "AsyncCollectiveTensor": lambda: issubclass(tensors.AsyncCollectiveTensor, Tensor),
        "version": lambda: tensors.version(torch.ones(2).add_(1)) == 1,
        "storage_id": lambda: (
            tensors.storage_id(X.untyped_storage()) == tensors.storage_id(X[0].untyped_storage())
            and tensors.storage_id(X.untyped_storage()) != tensors.storage_id(LEAF.untyped_storage())
        ),
        "base": lambda: tensors.base(X[0]) is X and tensors.base(X) is None,
        "unview": lambda: tensors.unview(X.t()).untyped_storage().data_ptr() == X.data_ptr() and X.t()._is_view(),
        "local": lambda: type(tensors.local(spread())) is Tensor,
        "spec": lambda: DTensor(X, tensors.spec(spread()), requires_grad=False).placements == (Replicate(),),
        "has_hooks": lambda: (
            not tensors.has_hooks(LEAF)
            and tensors.has_hooks(hooked("register_hook"))
            and tensors.has_hooks(hooked("register_post_accumulate_grad_hook"))
        ),
        "saved_tensors_hooks_in_force": lambda: (
            in_force() == (hash, abs) and tensors.saved_tensors_hooks_in_force() is None
        ),
        "saves_tensors": lambda: (
            tensors.saves_tensors(type((LEAF * LEAF).grad_fn)) and not tensors.saves_tensors(type(LEAF.t().grad_fn))
        ),
        "is_mapping": lambda: mapped() == [True] and not tensors.is_mapping(),
        "without_subclass_functions": lambda: type(without()) is Tensor,
        "tree_flatten": lambda: tensors.tree_flatten([X, {"a": 1}])[0] == [X, 1],
        "tree_leaves": lambda: tensors.tree_leaves((1, [2, {"a": 3}])) == [1, 2, 3],
        "tree_map_only": lambda: tensors.tree_map_only(int, str, [1, "b"]) == ["1", "b"],
        "tree_unflatten": lambda: tensors.tree_unflatten([5], tensors.tree_flatten({"a": 1})[1]) == {"a": 5},
        "parameters_of": lambda: tensors.parameters_of(LAYER)["weight"] is LAYER.weight,
        "buffers_of": lambda: set(tensors.buffers_of(nn.BatchNorm1d(2))) >= {"running_mean", "running_var"},
        "is_wrapped": lambda: tensors.is_wrapped(with_hook()) and not tensors.is_wrapped(LAYER),
        "compiled_call": lambda: (
            tensors.compiled_call(LAYER) is None and callable(tensors.compiled_call(in_place(nn.Linear(2, 2))))
        ),
        "is_compiled": lambda: (
            of_compiled(in_place(nn.Linear(2, 2)), LAYER) and of_compiled(torch.compile(LAYER, backend="eager"), LAYER)
        ),
        "must_stay_whole": breaking,
    },
    checkpoints: {"selective_checkpoints": keeping_products},
    groups: {
        "described_groups": lambda: groups.described_groups() == [("default_pg", [0])],
        "timeouts": lambda: set(groups.timeouts(dist.group.WORLD)) == {TIMEOUT},
        "set_timeout": lambda: with_timeout() == TIMEOUT,
        "delayed_parameters": lambda: not groups.delayed_parameters(DistributedDataParallel(nn.Linear(2, 2))),
    },
}


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in HOLDS.items() for name in names])
def test_a_private_name_means_what_it_is_used_for(room: ModuleType, name: str) -> None:
    assert HOLDS[room][name]()


@pytest.mark.parametrize("room", HOLDS)
def test_each_private_name_has_a_test(room: ModuleType) -> None:
    written = {name for name, value in vars(room).items() if getattr(value, "__module__", "") == room.__name__}
    assert HOLDS[room].keys() == written | set(getattr(room, "__all__", ()))


def test_parameters_of_fsdp() -> None:
    module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy())
    (group,) = fsdp.groups_of(module)
    weight, _ = group.parameters
    assert weight.shard is module.weight
    assert weight.whole is None
    assert not weight.gradients
    module(X).sum().backward()
    assert weight.name == "weight"
    assert weight.reduce_dtype is None
    module.unshard()
    assert weight.whole is module.weight
    assert sum(buffer.numel() for buffer in weight.gather_buffers) == 4
    weight.whole.grad = torch.ones(2, 2)
    weight.put_aside()
    assert len(weight.gradients) == 1
    reduce = fsdp.set_apart([module])
    assert not weight.gradients, "they are the copies' now"
    before = weight.shard.grad.full_tensor().clone()
    reduce()
    assert torch.equal(weight.shard.grad.full_tensor(), before + 1)
    weight.whole.grad = torch.ones(2, 2)
    module.set_is_last_backward(True)
    fsdp.end_backward(module)
    assert torch.equal(weight.shard.grad.full_tensor(), before + 2)
    assert group.gathering is None
    assert group.mesh.size() == 1
    assert isinstance(module, FSDPModule)


def test_torchs_pipelining_is_entered_where_it_was() -> None:
    runtime = pipelining.ScheduleRuntime.__mro__[1]
    for name in ("_step_microbatches", "_maybe_compute_loss", "_prepare_schedule_with_comms"):
        assert callable(getattr(runtime, name))
    assert str(pipelining.Action.from_str("0F1")) == "0F1"
    assert issubclass(pipelining.StageBase, object)
    assert callable(getattr(pipelining.PipelineSchedule, pipelining.COMPUTE_LOSS))


def test_methods_are_replaced_for_a_while() -> None:
    """Also what another has put in their place."""

    class Stage:
        def run(self) -> str:
            return "torch's"

    stage: Any = Stage()
    with pipelining.replaced(stage, {"run": lambda: "outer"}):
        with pipelining.replaced(stage, {"run": lambda: "inner"}):
            assert stage.run() == "inner"
        assert stage.run() == "outer"
    assert stage.run() == "torch's"


def test_selective_checkpoints_of_others_are_not_noted_and_torch_is_as_it_was_afterwards() -> None:
    """Another thread's context ends after the one that began later, and its checkpoints are its own."""
    plain, others, (begun, over) = _CachingTorchDispatchMode.__enter__, parameter(3, 3), (Event(), Event())

    def other() -> list[Tensor]:
        with checkpoints.selective_checkpoints() as kept:
            begun.set()
            assert over.wait(120)
            checkpointed(others)
        return list(kept())

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(other)
        assert begun.wait(120)
        with checkpoints.selective_checkpoints() as kept, ThreadPoolExecutor(1) as unnoted:
            unnoted.submit(checkpointed, parameter(4, 4)).result()
            checkpointed(LEAF)
        over.set()
        assert [tensor.shape for tensor in there.result()] == [others.shape]
    assert [tensor.shape for tensor in kept()] == [LEAF.shape]
    assert _CachingTorchDispatchMode.__enter__ is plain
