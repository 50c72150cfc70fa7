"""Trains a GPT in pipeline stages with OptPipe, one stage a rank. A service can improve the schedule while it trains.

torchrun --nproc-per-node 2 examples/train_gpt.py [--service http://127.0.0.1:8000]
"""

import argparse
import logging

import torch
import torch.distributed as dist

import gpt  # a model and a text; use your own here
import optpipe
import text
from optpipe_runtime import Follower, Pipeline

MICROBATCHES = 8
SIZE = gpt.Size(width=128, blocks=4, context=64, sequences=4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--service", help="address of `optpipe serve`")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("optpipe").setLevel(logging.INFO)  # also which schedules are adopted

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = gpt.stages(SIZE, ranks)[rank]
    optimizer = torch.optim.AdamW(module.parameters(), lr=gpt.LEARNING_RATE)
    corpus = text.corpus()

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return text.batch(corpus, step, MICROBATCHES * SIZE.sequences, SIZE.context)

    pipe = Pipeline({rank: module}, range(ranks), gpt.loss, MICROBATCHES)
    problem = pipe.profile(*batch(0), activation_budget_bytes=16 * 2**20)
    train = Follower(pipe, arguments.service) if arguments.service else pipe
    if train is pipe:  # else the service sends schedules while the training runs
        pipe.load(optpipe.solve(problem, time_limit_s=10).schedule if rank == 0 else None)
    for step in range(arguments.steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        losses = train.step(inputs, targets).losses
        optimizer.step()
        if losses:
            print(f"step {step}: loss {sum(losses) / len(losses):.4f}", flush=True)
    train.close()
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
