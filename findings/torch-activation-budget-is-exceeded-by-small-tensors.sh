#!/usr/bin/env bash
# torch 2.13.0: dp_knapsack, which chooses the activations to keep for an activation_memory_budget of torch.compile (solver
# "dp", the one it takes where nothing is said), rounds each size to 1/10,000 of all. With a thousand activations of 0.00014
# each, a budget of 0.1 returns 0.14 of the memory; with sizes below 0.00005 all of them are free. The greedy solver keeps
# within both budgets.
#
# Expected: sizes rounded up, so that a budget holds. Seen: 40 % above it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - 2>/dev/null <<'PYTHON' | tee "$folder/seen"
from torch._functorch import config
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack, greedy_knapsack

print("solver:", config.activation_memory_budget_solver)
for small, large in (0.00014, 0.0086), (0.00004, 0.0096):
    memory = [small] * 1000 + [large] * 100  # of all that could be kept, as the partitioner passes it
    for solve in dp_knapsack, greedy_knapsack:
        budget = 0.1 if small > 0.0001 else 0.02
        _, keep, _ = solve(memory, [1.0] * len(memory), budget)
        used = sum(memory[i] for i in keep)
        print(f"{solve.__name__}, 1000 of {small:.5f}, budget {budget}: keeps {used:.3f}")
PYTHON
diff - "$folder/seen" <<'SEEN'
solver: dp
dp_knapsack, 1000 of 0.00014, budget 0.1: keeps 0.140
greedy_knapsack, 1000 of 0.00014, budget 0.1: keeps 0.100
dp_knapsack, 1000 of 0.00004, budget 0.02: keeps 0.059
greedy_knapsack, 1000 of 0.00004, budget 0.02: keeps 0.020
SEEN
echo "as stated"
