#!/usr/bin/env bash
# numba 0.68.1: sorted(..., key=...) and list.sort(key=...) in compiled code are not stable. Up to some 15 entries equal ones
# keep their order, so small tests pass; from 20 on they do not.
#
# Expected: the order that Python defines, with and without njit. Seen: a list rule that breaks ties by the order in the list
# makes another schedule once it is compiled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check numba==0.68.1 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import random

from numba import njit
from numba.typed import List


def priority(op):
    return op[0]


def by_sorted(ops, key):
    return sorted(ops, key=key)


def by_sort(ops, key):
    ops.sort(key=key)
    return ops


for count in 8, 20, 100:
    draw = random.Random(0)
    ops = [(draw.randint(0, 3), i) for i in range(count)]
    for sort in by_sorted, by_sort:
        compiled = list(njit(sort)(List(ops), njit(priority)))
        sorts = [op[0] for op in compiled] == sorted(op[0] for op in ops)
        print(f"{sort.__name__}, {count} entries: sorted {sorts}, as in Python {compiled == sort(list(ops), priority)}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
by_sorted, 8 entries: sorted True, as in Python True
by_sort, 8 entries: sorted True, as in Python True
by_sorted, 20 entries: sorted True, as in Python False
by_sort, 20 entries: sorted True, as in Python False
by_sorted, 100 entries: sorted True, as in Python False
by_sort, 100 entries: sorted True, as in Python False
SEEN
echo "as stated"
