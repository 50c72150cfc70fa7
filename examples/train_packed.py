"""Trains a GPT on packed documents in pipeline stages with OptPipe, one stage a rank, with a schedule for every step.

torchrun --nproc-per-node 2 examples/train_packed.py
"""

import argparse

import torch
import torch.distributed as dist

import gpt  # a model and a text; use your own here
import text
from optpipe_runtime import Microbatches, Pipeline, PlannedSteps

MICROBATCHES, DOCUMENTS = 8, 4  # of a step, and of a micro-batch
SIZE = gpt.Size(width=128, blocks=4, context=256)


def features(tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, float]:
    return {"tokens": tokens.numel(), "squares": float(lengths.square().sum())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = gpt.stages(SIZE, ranks)[rank]
    optimizer = torch.optim.AdamW(module.parameters(), lr=gpt.LEARNING_RATE)
    documents = text.documents(text.corpus(), SIZE.context)

    def batch(step: int) -> tuple[Microbatches, Microbatches, dict[str, Microbatches]]:
        rows = text.packed(documents, step, MICROBATCHES, DOCUMENTS)
        inputs, targets, lengths = map(Microbatches, zip(*rows, strict=True))
        return inputs, targets, {"lengths": lengths}

    pipe = Pipeline({rank: module}, range(ranks), gpt.loss, MICROBATCHES)
    train = PlannedSteps(pipe, features, activation_budget_bytes=64 * 2**20)
    for step, (inputs, targets, kwargs) in enumerate(train.ahead(map(batch, range(arguments.steps)))):
        optimizer.zero_grad()
        report = train.step(inputs, targets, kwargs, weights=[each.numel() for each in targets])
        optimizer.step()
        if report.loss is not None:
            print(f"step {step}: loss {report.loss:.4f}", flush=True)
    train.close()
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
