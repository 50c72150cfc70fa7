"""Fine-tunes a small Llama of transformers in pipeline stages. `LlamaForCausalLM.from_pretrained` works as well.

torchrun --nproc-per-node 2 examples/train_hf.py
"""

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import optpipe
import text  # use your own here
from optpipe_runtime import Pipeline, on_all_ranks, profile_layers, stages_of

MICROBATCHES, SEQUENCES, CONTEXT = 8, 2, 64
CONFIG = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    corpus = text.corpus()

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model.loss_function(logits, labels, CONFIG.vocab_size)  # type: ignore[no-any-return]

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = text.batch(corpus, step, MICROBATCHES * SEQUENCES, CONTEXT)
        return tokens, tokens

    # Where the model is cut, and which rank runs which of its layers, is found with the schedule.
    problem = profile_layers(model, loss, MICROBATCHES, *batch(0), activation_budget_bytes=16 * 2**20)
    found = optpipe.solve(problem, placements="all", time_limit_s=10).schedule if dist.get_rank() == 0 else None
    schedule = on_all_ranks(found)
    stages = stages_of(model, schedule)
    optimizer = torch.optim.AdamW([p for stage in stages.values() for p in stage.parameters()], lr=1e-3)

    with Pipeline(stages, [stage.device for stage in schedule.problem.stages], loss, MICROBATCHES) as pipe:
        pipe.load(schedule)
        if dist.get_rank() == 0:
            print(
                f"{schedule.method} in {schedule.makespan_ms:.1f} ms; {schedule.placement or 'one stage a rank'}",
                flush=True,
            )
        for step in range(steps):
            optimizer.zero_grad()
            report = pipe.step(*batch(step))
            optimizer.step()
            if report.loss is not None:
                print(f"step {step}: loss {report.loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
