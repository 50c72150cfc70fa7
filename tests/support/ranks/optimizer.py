"""What the ranks run in `test_optimizer`: training with optimizers on the host, and a plain run with the same
optimizers."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout, Pipeline, StepReport
from support.ranks.cases import batch, batches, loss_fn, make_stages, numbers, own_stages, plain_training, refusals
from support.ranks.replicas import parameters

Values = dict[str, np.ndarray[Any, Any]]


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01, weight_decay=0.1)


def momentum(named: Any) -> torch.optim.Optimizer:
    """Of nearly equal gradients, unlike AdamW, it makes nearly equal steps."""
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def plain(stages: int, microbatches: int, steps: int, factory: Any = adam) -> tuple[list[list[float]], Values]:
    """In one process, one optimizer for all stages: losses by step, and the parameters in the end."""
    modules = make_stages(stages)
    optimizer = factory([p for module in modules for p in module.parameters()])
    trained = plain_training(modules, batches(steps, microbatches), microbatches, optimizer)
    return [step.losses for step in trained], parameters(dict(enumerate(modules)))


class Training:
    """A pipeline of `make_stages` whose stages in `hosted` are updated on the host, the others on the device."""

    def __init__(
        self, layout: Layout, hosted: Sequence[int], factory: Any = adam, dtype: torch.dtype = torch.float32
    ) -> None:
        self.layout = layout
        self.modules = {s: module.to(dtype) for s, module in own_stages(layout.placement).items()}
        factories = dict.fromkeys(hosted, factory)
        ways = {"links": layout.links or None, "full_duplex": layout.full_duplex}
        self.pipe = Pipeline(
            self.modules, layout.placement, loss_fn, layout.microbatches, host_optimizers=factories, **ways
        )
        here = [p for s, module in self.modules.items() if s not in hosted for p in module.parameters()]
        self.optimizer = factory([torch.zeros(0), *here])

    def step(self, number: int, schedule: Schedule) -> StepReport:
        self.pipe.load(schedule)
        self.optimizer.zero_grad()
        report = self.pipe.step(*batch(number, self.layout.microbatches), trace=True)
        self.optimizer.step()
        return report


def train(
    schedules: Sequence[Schedule], hosted: Sequence[int], factory: Any = adam
) -> tuple[list[StepReport], Values, set[str]]:
    training = Training(Layout.from_problem(schedules[0].problem), hosted, factory)
    with training.pipe as pipe:
        reports = [training.step(k, schedule) for k, schedule in enumerate(schedules)]
        pipe.synchronize()
        return reports, parameters(training.modules), set(numbers(training.modules))


def resume(
    schedule: Schedule, hosted: Sequence[int], at: int, steps: int, module_first: bool
) -> tuple[list[Any], Values]:
    """Trains for `at` steps, saves, and goes on from there with other modules, whose parameters were zeros."""
    before = Training(Layout.from_problem(schedule.problem), hosted)
    with before.pipe as pipe:
        for k in range(at):
            before.step(k, schedule)
        pipe.synchronize()
        saved = deepcopy({s: module.state_dict() for s, module in before.modules.items()})
        hosts = deepcopy({s: host.state_dict() for s, host in pipe.host_optimizers.items()})
        optimizer = deepcopy(before.optimizer.state_dict())
    after = Training(Layout.from_problem(schedule.problem), hosted)
    for parameter in (p for module in after.modules.values() for p in module.parameters()):
        nn.init.zeros_(parameter)
    with after.pipe as pipe:
        modules, optimizers = list(after.modules.items()), list(pipe.host_optimizers.items())
        for s, part in modules + optimizers if module_first else optimizers + modules:
            part.load_state_dict((saved if isinstance(part, nn.Module) else hosts)[s])
            loaded = {} if isinstance(part, nn.Module) else hosts[s]["parameters"]
            assert all(torch.equal(after.modules[s].get_parameter(name), value) for name, value in loaded.items())
        after.optimizer.load_state_dict(optimizer)
        losses = [after.step(k, schedule).losses for k in range(at, steps)]
        pipe.synchronize()
        return losses, parameters(after.modules)


def rounded(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.from_numpy(value).bfloat16().float().numpy()


def low_precision(schedule: Schedule, steps: int) -> tuple[Values, Values]:
    """In bfloat16, with updates that mostly round to nothing there: parameters on the device, and on the host. In the
    end the modules load what they have."""
    training = Training(
        Layout.from_problem(schedule.problem), [2, 3], lambda named: torch.optim.SGD(named, lr=1e-4), torch.bfloat16
    )
    with training.pipe as pipe:
        for k in range(steps):
            training.step(k, schedule)
        pipe.synchronize()
        for s, host in pipe.host_optimizers.items():
            training.modules[s].load_state_dict(deepcopy(training.modules[s].state_dict()))
            host.start_step()
        hosts = {s: host.state_dict()["parameters"] for s, host in pipe.host_optimizers.items()}
        on_device = {s: dict(training.modules[s].named_parameters()) for s in hosts}
    return (
        {f"{s}.{name}": p.detach().float().numpy() for s, named in on_device.items() for name, p in named.items()},
        {f"{s}.{name}": p.numpy() for s, named in hosts.items() for name, p in named.items()},
    )


def load_between_steps(schedule: Schedule) -> tuple[float, str, bool]:
    """Loads ones between steps of learning rate 0; then changes a parameter at the wrong moment."""
    training = Training(Layout.from_problem(schedule.problem), [2, 3], lambda named: torch.optim.SGD(named, lr=0.0))
    ours = next(iter(training.pipe.host_optimizers))
    module = training.modules[ours]
    with training.pipe as pipe:
        training.step(0, schedule)
        pipe.synchronize()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.5)
        training.step(1, schedule)
        evaluated = pipe.evaluate(*batch(2, training.layout.microbatches)).step_ms > 0
        away = max(float((p - 0.5).abs().max()) for p in module.parameters())
        training.step(2, schedule)
        with torch.no_grad():
            next(module.parameters()).zero_()
        (told,) = refusals(pipe.synchronize)
    return away, told, evaluated


def mistakes(schedule: Schedule) -> list[str]:
    """What a user is told who makes each of these mistakes, on every rank."""
    layout, rank = Layout.from_problem(schedule.problem), torch.distributed.get_rank()

    def pipeline(modules: dict[int, nn.Module], **options: Any) -> Pipeline:
        return Pipeline(modules, layout.placement, loss_fn, layout.microbatches, **options)

    shared = nn.Linear(2, 2)
    told = refusals(
        lambda: Training(layout, [2, 3], lambda named: 1),
        lambda: pipeline({rank: nn.Identity(), 2 + rank: nn.Identity()}, host_optimizers={2: adam, 3: adam}),
        lambda: pipeline({rank: shared, 2 + rank: shared}, host_optimizers={2: adam, 3: adam}),
    )
    plainly, hosted = Training(layout, []), Training(layout, [2, 3])
    unclipped = pipeline(own_stages(layout.placement), host_optimizers={2: adam, 3: adam}, clip_host_updates=True)
    with plainly.pipe, hosted.pipe, unclipped:
        unclipped.load(schedule)
        unclipped.step(*batch(0, layout.microbatches))
        host, state = hosted.pipe.host_optimizers[2 + rank], plainly.modules[rank].state_dict()
        return told + refusals(
            lambda: plainly.pipe.load(schedule),
            lambda: hosted.pipe.tie(hosted.modules[2] if rank == 0 else hosted.modules[1]),
            lambda: hosted.pipe.clip_grad_norm_(1.0),
            lambda: host.load_state_dict(state),
            lambda: host.load_state_dict({"parameters": state, "optimizer": {}}),
            lambda: unclipped.step(*batch(1, layout.microbatches)),
        )


def failing_update(schedule: Schedule) -> list[str]:
    """The notes of what stage 2's optimizer raises on rank 0; nothing on rank 1."""

    def breaks(named: Any) -> torch.optim.Optimizer:
        optimizer = adam(named)
        optimizer.register_step_pre_hook(_fail)
        return optimizer

    training = Training(
        Layout.from_problem(schedule.problem), [2, 3], breaks if torch.distributed.get_rank() == 0 else adam
    )
    try:
        training.step(0, schedule)
    except ValueError as error:
        return error.__notes__
    finally:
        training.pipe.close()
    return []


def _fail(*_: Any) -> None:
    raise ValueError("not today")


def profiled(placement: Sequence[int], microbatches: int, hosted: Sequence[int]) -> tuple[Problem, bool]:
    training = Training(Layout.make(placement, microbatches), hosted)
    before = parameters(training.modules)
    with training.pipe as pipe:
        problem = pipe.profile(*batch(0, microbatches), activation_budget_bytes=10**9, repeats=2)
    same = all(np.array_equal(value, before[name]) for name, value in parameters(training.modules).items())
    return problem, same and not numbers(training.modules) and not any(
        host.optimizer.state for host in pipe.host_optimizers.values()
    )
