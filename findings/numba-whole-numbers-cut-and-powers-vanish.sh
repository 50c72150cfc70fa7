#!/usr/bin/env bash
# numba 0.68.1: two silent integer results. A float that is assigned to an item of a list of ints is cut to an int, while append
# of the same float is refused by the compiler. And 2 ** -k for an int k is the int 0, where Python gives 0.5 and NumPy raises.
#
# Expected: Python's value, or the error that append gives. Seen: durations that are scaled in place are rounded down, and a
# weight or a temperature that halves with each step is 0 at once, only where the function is compiled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check numba==0.68.1 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import numpy as np
from numba import njit


def stretch(durations):
    for i in range(len(durations)):
        durations[i] = durations[i] * 1.5
    return sum(durations)


def append(durations):
    durations.append(1.5)


def half(k):
    return 2 ** -k


print("item:", stretch([1, 3, 5]), "compiled", njit(stretch)([1, 3, 5]))
try:
    njit(append)([1, 3, 5])
    print("append: accepted")
except Exception:
    print("append: refused")
print("2 ** -1:", half(1), "compiled", njit(half)(1))
try:
    print(np.int64(2) ** np.int64(-1))
except ValueError as error:
    print("2 ** -1 in NumPy:", type(error).__name__)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
item: 13.5 compiled 12
append: refused
2 ** -1: 0.5 compiled 0
2 ** -1 in NumPy: ValueError
SEEN
echo "as stated"
