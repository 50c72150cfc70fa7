#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint: stages whose modules name their parameters alike ("layers.0.weight" on each rank,
# as modules built by hand for a PipelineStage do) save one entry for all, of one rank. On load every stage gets the same
# weights. No error, no warning, if shapes are equal, as they are in the middle of a pipeline. Which rank's is kept differs by
# entry.
#
# Expected: an error on save, since the ranks' values differ, or one entry per rank. Seen: both stages load the weights of the
# first with the seed and the counter of the second, so neither has a state of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank = dist.get_rank()
stage = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
torch.nn.init.constant_(stage[0].weight, rank + 1)
state = {"model": stage.state_dict(), "seed": torch.tensor(100 + rank), "seen": 10 * (rank + 1)}
where = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(where)
dcp.save(state, checkpoint_id=where[0])
loaded = {"model": {"0.weight": torch.zeros(2, 2)}, "seed": torch.tensor(0), "seen": 0}
dcp.load(loaded, checkpoint_id=where[0])
both = [None] * 2
dist.all_gather_object(both, [(s["model"]["0.weight"].mean().item(), s["seed"].item(), s["seen"]) for s in (state, loaded)])
if rank == 0:
    for r, (saved, read) in enumerate(both):
        print(f"stage {r}: saved {saved}, loaded {read}")
dist.barrier()
dist.destroy_process_group()
PYTHON
TMPDIR="$folder" OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/run.py" 2>/dev/null | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
stage 0: saved (1.0, 100, 10), loaded (1.0, 101, 20)
stage 1: saved (2.0, 101, 20), loaded (1.0, 101, 20)
SEEN
echo "as stated"
