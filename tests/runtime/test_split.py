"""Deferred weight gradients have the same bits as those of plain autograd. Where deferring would be wrong, plain
autograd runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe_runtime.stage.split import Splitting, WeightQueue

WORDS = torch.tensor([[1, 2, 1, 0], [3, 3, 0, 1]])


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def plain_and_split(
    module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]
) -> tuple[WeightQueue, dict[str, Tensor | None]]:
    """Runs plain, then split up to B, comparing input gradients; returns the queue for W and the expected gradients."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    y = run(inputs[0])
    dy = torch.randn_like(y)
    torch.autograd.backward(y, dy)
    expected = gradients(module)
    module.zero_grad()
    queue = WeightQueue()
    queue.deferring = True
    with Splitting():
        again = run(inputs[1])
    assert torch.equal(again, y)
    with queue.filling():
        torch.autograd.backward(again, dy)
    if inputs[0].grad is not None:
        assert inputs[1].grad is not None
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    return queue, expected


def require_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        other = found[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert torch.equal(grad, other), name
            assert grad.dtype == other.dtype


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8), (8,)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_wait_for_w(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 6, bias=bias)
    queue, expected = plain_and_split(module, torch.randn(shape), module)
    assert all(grad is None for grad in gradients(module).values()), "nothing at B"
    assert sum(queue.held().values()) == 4 * torch.zeros(shape).numel() * (8 + 6) // 8
    queue.run()
    require_equal(gradients(module), expected)
    assert not queue.held()


def test_a_transposed_input() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 6)
    queue, expected = plain_and_split(module, torch.randn(5, 8, 4), lambda x: module(x.transpose(1, 2)))
    queue.run()
    for name, grad in gradients(module).items():
        torch.testing.assert_close(grad, expected[name])


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
def test_embeddings_wait_for_w(options: dict[str, int]) -> None:
    module = nn.Embedding(4, 3, **options)  # type: ignore[arg-type]
    queue, expected = plain_and_split(module, WORDS, module)
    assert module.weight.grad is None
    queue.run()
    require_equal(gradients(module), expected)


def test_gradients_are_added_to_those_that_are_there() -> None:
    module = nn.Linear(4, 4)
    queue, expected = plain_and_split(module, torch.randn(3, 4), module)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    queue.run()
    require_equal(gradients(module), {name: 1 + grad for name, grad in expected.items() if grad is not None})


class Reparametrized(nn.Module):
    """Its weight is computed, so its gradient must flow on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(6, 1)), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.scale * self.weight)


@pytest.mark.parametrize("module", [Reparametrized(), nn.PReLU()], ids=["computed weight", "scale"])
def test_other_parameters_get_their_gradient_at_b(module: nn.Module) -> None:
    torch.manual_seed(0)
    queue, expected = plain_and_split(module, torch.randn(5, 8), module)
    require_equal(gradients(module), expected)
    assert not queue.held()


def test_renormed_weights_stay_plain() -> None:
    renormed = nn.Embedding(4, 3, max_norm=0.5)
    _, expected = plain_and_split(renormed, WORDS, renormed)
    require_equal(gradients(renormed), expected)


@pytest.mark.parametrize("first", [nn.Linear(8, 6), nn.Embedding(4, 6)])
def test_later_ops_may_change_the_output_in_place(first: nn.Module) -> None:
    module = nn.Sequential(first, nn.ReLU(inplace=True))
    queue, expected = plain_and_split(
        module, WORDS if isinstance(first, nn.Embedding) else torch.randn(2, 5, 8), module
    )
    queue.run()
    require_equal(gradients(module), expected)


@pytest.mark.parametrize("shape", [(8,), (5, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norms_wait_for_w(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.LayerNorm(shape, bias=bias)
    nn.init.normal_(module.weight)
    queue, expected = plain_and_split(module, torch.randn(3, 8, 5).transpose(1, 2), module)
    assert module.weight.grad is None
    assert sum(queue.held().values()) == 4 * (2 * 120 + 2 * (120 // torch.zeros(shape).numel())), (
        "input, gradient, mean and deviation"
    )
    queue.run()
    require_equal(gradients(module), expected)


def test_norms_that_do_not_wait_for_w() -> None:
    module, queue = nn.LayerNorm(8), WeightQueue()
    queue.deferring = True
    with Splitting(norms=False):
        y = module(torch.randn(3, 8))
    with queue.filling():
        torch.autograd.backward(y.sum())
    assert module.weight.grad is not None


def test_one_weight_for_words_and_output() -> None:
    torch.manual_seed(0)
    module = nn.Embedding(4, 8)
    queue, expected = plain_and_split(
        module, WORDS, lambda words: functional.linear(torch.tanh(module(words)), weight=module.weight)
    )
    assert module.weight.grad is None
    queue.run()
    torch.testing.assert_close(module.weight.grad, expected["weight"])


def test_a_weight_cast_for_its_product() -> None:
    """The gradient comes back through the cast, in float32."""
    module = nn.Linear(8, 6, bias=False)
    queue, expected = plain_and_split(
        module, torch.randn(5, 8), lambda x: functional.linear(x.bfloat16(), module.weight.bfloat16())
    )
    assert module.weight.grad is None
    queue.run()
    require_equal(gradients(module), expected)


def test_parts_of_a_weight() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 24, bias=False)

    def run(x: Tensor) -> Tensor:
        q, k, v = module.weight.chunk(3)
        return functional.linear(x, q) * functional.linear(x, k) + x @ v.t()

    queue, expected = plain_and_split(module, torch.randn(5, 8), run)
    assert module.weight.grad is None
    queue.run()
    torch.testing.assert_close(module.weight.grad, expected["weight"])


@pytest.mark.parametrize("others", [0, 1])
def test_a_weight_computed_from_weights_gets_its_gradient_at_b(others: int) -> None:
    """Its gradient comes at B, as does that of every parameter that it is made of."""
    module = nn.ParameterList([torch.randn(8, 8), torch.randn(8, 8)])
    queue, expected = plain_and_split(
        module, torch.randn(5, 8), lambda x: x @ (module[0] @ module[1]) + others * x @ module[1]
    )
    assert module[0].grad is not None
    queue.run()
    for name, grad in gradients(module).items():
        torch.testing.assert_close(grad, expected[name])


def test_gradients_come_at_once_outside_a_pipeline() -> None:
    module = nn.Sequential(nn.Conv1d(5, 5, 1), nn.Linear(8, 6))
    x = torch.randn(2, 5, 8)
    with Splitting():
        y = module(x)
    torch.autograd.backward(y.sum())
    found = gradients(module)
    module.zero_grad()
    torch.autograd.backward(module(x).sum())
    require_equal(found, gradients(module))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_torch(layout: torch.layout) -> None:
    module, queue = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6)), WeightQueue()
    queue.deferring = True
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    with Splitting():
        y = module(torch.nested.nested_tensor(parts, layout=layout).requires_grad_())
    with queue.filling():
        torch.autograd.backward(sum(part.sum() for part in y.unbind()))
    assert all(grad is not None for grad in gradients(module).values())
    assert not queue.held()
