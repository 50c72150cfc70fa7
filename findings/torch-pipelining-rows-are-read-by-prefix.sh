#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: an action of a schedule file is read by its prefix, and what is behind it is
# dropped in silence. "0FULL_BACKWARD3" is a forward, "0BW3" a backward without a micro-batch, "0F3#late" is "0F3".
#
# Expected: text that is no action raises, as "0f3" does. Seen: a file with the spelled-out names of the enum
# _ComputationType, or with another tool's suffix, loads as another schedule.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON' | tee "$folder/seen"
from torch.distributed.pipelining.schedules import _Action

for text in "0F3", "0FULL_BACKWARD3", "0BW3", "0F3#late", "3W0W1", "0F-3", "1SEND_FX3", "0f3":
    try:
        print(text, "is", _Action.from_str(text))
    except RuntimeError:
        print(text, "raises RuntimeError")
PYTHON
diff - "$folder/seen" <<'SEEN'
0F3 is 0F3
0FULL_BACKWARD3 is 0F
0BW3 is 0B
0F3#late is 0F3
3W0W1 is 3W0
0F-3 is 0F
1SEND_FX3 is 1SEND_F
0f3 raises RuntimeError
SEEN
echo "as stated"
