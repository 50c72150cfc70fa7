"""Trains a GPT in pipeline stages with torch.distributed.pipelining, one stage a rank.

torchrun --nproc-per-node 2 examples/train_gpt_plain.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import gpt  # a model and a text; use your own here
import text

MICROBATCHES = 8
SIZE = gpt.Size(width=128, blocks=4, context=64, sequences=4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = gpt.stages(SIZE, ranks)[rank]
    optimizer = torch.optim.AdamW(module.parameters(), lr=gpt.LEARNING_RATE)
    corpus = text.corpus()

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return text.batch(corpus, step, MICROBATCHES * SIZE.sequences, SIZE.context)

    pipe = Schedule1F1B(PipelineStage(module, rank, ranks, torch.device("cpu")), MICROBATCHES, gpt.loss)
    for step in range(arguments.steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        pipe.step(*[inputs] * (rank == 0), target=targets if rank == ranks - 1 else None, losses=losses)
        optimizer.step()
        if losses:
            print(f"step {step}: loss {sum(losses) / len(losses):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
