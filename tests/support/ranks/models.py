"""Models as their authors wrote them, cut by `stages_of`, and the plain run of each."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, StepReport, stages_of
from support.ranks import cases

MICROBATCHES, WIDTH, WORDS, LENGTH = 3, 8, 11, 5
Found = tuple[list[StepReport], dict[str, Any]]  # a report of each way, and gradients of the last


def programs(placement: Sequence[int], how: str) -> Schedule:
    return Schedule.parse(cases.problem(placement, MICROBATCHES), in_turn(placement, how))


def in_turn(placement: Sequence[int], how: str) -> list[list[str]]:
    """Micro-batch by micro-batch, with split backwards; every activation kept, offloaded or recomputed."""
    between = {"kept": "", "offloaded": "ODR", "recomputed": "C"}[how]
    lists: list[list[str]] = [[] for _ in range(max(placement) + 1)]
    for j in range(MICROBATCHES):
        for s, owner in enumerate(placement):
            lists[owner] += [f"{s}F{j}", *(f"{s}{kind}{j}" for kind in between if kind in "OD")]
        for s, owner in reversed(list(enumerate(placement))):
            lists[owner] += [*(f"{s}{kind}{j}" for kind in between if kind in "RC"), f"{s}B{j}", f"{s}W{j}"]
    return lists


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.places = nn.Identity()  # has no parameters, as rotary embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
    ) -> Any:
        assert not use_cache
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        places = torch.arange(hidden.shape[1])[None] if position_ids is None else position_ids
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, attention_mask, self.places(places), scale=1.0 + i)
        return SimpleNamespace(last_hidden_state=self.norm(hidden))


class CausalLM(nn.Module):
    base_model_prefix = "model"

    def __init__(self, layers: int = 3, tied: bool = True, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=WIDTH, **config)
        self.model = Decoder(layers)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def forward(self, **given: Any) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(**given).last_hidden_state))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, places: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        y = self.inner(x if places is None else x + places[..., None] / LENGTH)
        return x + scale * torch.tanh(y if mask is None else y * mask[..., None])


class Skips(nn.Module):
    """The last stage needs what the first one made, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.a(x)
        second = self.b(torch.tanh(first))
        result: Tensor = self.c(torch.relu(second)) * mask + first
        return result


def model(kind: str) -> Any:
    torch.manual_seed(5)
    if kind == "causal LM":
        return CausalLM()
    if kind == "layers":
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), Layer(), nn.Tanh(), Layer(), nn.Linear(WIDTH, WORDS))
    return Skips()


def model_layers() -> int:
    return len(model("layers"))


def data(kind: str) -> tuple[Any, Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(9)
    n = 2 * MICROBATCHES
    if kind == "skips":
        x, y = torch.randn(2, n, WIDTH, generator=generator)
        return (x, (x > 0).float()), y, {}
    words = torch.randint(WORDS, (n, LENGTH + 1), generator=generator)
    mask = torch.randint(2, (n, LENGTH), generator=generator).float()
    if kind == "causal LM":
        return words[:, :-1], words[:, 1:], {"attention_mask": mask, "position_ids": torch.arange(LENGTH)[None] + 2}
    return words[:, :-1], words[:, 1:], {"mask": mask.t().contiguous(), "places": None, "scale": 0.5}


SPECS = {  # masks of the layers are cut along their second dimension; the same positions are for all micro-batches
    "causal LM": {"position_ids": None},
    "layers": {"mask": TensorChunkSpec(1)},
    "skips": {},
}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    if output.shape == target.shape:
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def parts(kind: str, placement: Sequence[int]) -> dict[int, nn.Module]:
    whole = model(kind)
    if kind != "skips":
        return stages_of(whole, placement)
    inputs, _, _ = data(kind)
    example = tuple(tensor[:2] for tensor in inputs)
    pipe = pipeline(whole, example, split_spec={"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING})
    return stages_of(pipe, placement)


def turned(mask: Tensor) -> Tensor:
    """The layers' mask, which has batch and length exchanged."""
    return mask.t()


def trained(kind: str, placement: Sequence[int]) -> Found:
    inputs, targets, kwargs = data(kind)
    stages, reports = parts(kind, placement), []
    if kind == "layers":
        for stage in stages.values():
            for layer in stage.modules():
                if isinstance(layer, Layer):
                    layer.register_forward_pre_hook(_turn, with_kwargs=True)
    with Pipeline(stages, placement, loss_fn, MICROBATCHES, kwargs_chunk_spec=SPECS[kind]) as pipe:
        for how in ("kept", "offloaded", "recomputed"):
            for stage in stages.values():
                stage.zero_grad()
            pipe.load(programs(placement, how))
            for _ in range(2):  # a step whose bytes are counted, and one whose are not
                for stage in stages.values():
                    stage.zero_grad()
                reports.append(pipe.step(inputs, targets, kwargs=kwargs, outputs=True))
        reports.append(pipe.evaluate(inputs, targets, kwargs=kwargs, outputs=True))
        profiled = pipe.profile(inputs, targets, 10**9, repeats=1, kwargs=kwargs)
        assert all(stage.forward_ms > 0 for stage in profiled.stages)
    return reports, cases.numbers(stages)


def _turn(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"mask": turned(kwargs["mask"])}


def plain(kind: str) -> tuple[list[float], list[Tensor], nn.Module]:
    whole = model(kind)
    inputs, targets, kwargs = data(kind)
    losses, outputs = [], []
    for j in range(MICROBATCHES):
        here = slice(2 * j, 2 * j + 2)
        if kind == "causal LM":
            output = whole(
                input_ids=inputs[here],
                attention_mask=kwargs["attention_mask"][here],
                position_ids=kwargs["position_ids"],
                use_cache=False,
            ).logits
        elif kind == "layers":
            output = inputs[here]
            for layer in whole:
                named = {"mask": turned(kwargs["mask"][:, here]), "scale": 0.5} if isinstance(layer, Layer) else {}
                output = layer(output, **named)
        else:
            output = whole(*(tensor[here] for tensor in inputs))
        loss = loss_fn(output, targets[here])
        torch.autograd.backward(loss / MICROBATCHES)
        losses.append(loss.item())
        outputs.append(output.detach())
    return losses, outputs, whole


def of_torch(placement: Sequence[int]) -> tuple[list[float] | None, list[str]]:
    """Torch's own stages of this rank, as they are: losses of a step, and what is not possible."""
    rank, told = dist.get_rank(), []
    modules = cases.make_stages(len(placement))
    theirs = [
        PipelineStage(modules[s], s, len(placement), torch.device("cpu")) for s in range(2) if placement[s] == rank
    ]
    stages = stages_of(theirs, placement)
    inputs, targets = cases.batch(0, MICROBATCHES)
    with Pipeline(stages, placement, cases.loss_fn, MICROBATCHES) as pipe:
        pipe.load(programs(placement, "kept"))
        losses = pipe.step(inputs, targets).losses
        for kwargs in ({"mask": torch.zeros(4)}, {"mask": inputs}):
            try:
                pipe.step(inputs, targets, kwargs=kwargs)
            except Exception as error:
                told.append(str(error))
                break
    return losses, told
