#!/usr/bin/env bash
# numba 0.68.1: a list that is an argument of a compiled function is changed by it as in Python. A list in a tuple or a
# namedtuple that is the argument is not: the function sees its own changes, and the caller's list is as before. No error, no
# warning that says so.
#
# Expected: the same as for the list alone, or a refusal as for a list of lists. Seen: arguments that are packed into one
# namedtuple lose what the function wrote into them, so a schedule stays empty.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check numba==0.68.1 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
from collections import namedtuple

from numba import njit

Schedule = namedtuple("Schedule", "starts count")


def of_list(starts, count):
    for i in range(count):
        starts[i] = 10 * i
    starts.append(99)
    return len(starts)


def of_tuple(schedule):
    for i in range(schedule[1]):
        schedule[0][i] = 10 * i
    schedule[0].append(99)
    return len(schedule[0])


for name, compiled in ("Python", lambda f: f), ("numba", njit):
    alone, inside, named = [1, 2, 3], ([1, 2, 3], 3), Schedule([1, 2, 3], 3)
    print(f"{name}, list: {compiled(of_list)(alone, 3)} entries inside, then {alone}")
    print(f"{name}, tuple: {compiled(of_tuple)(inside)} entries inside, then {inside[0]}")
    print(f"{name}, namedtuple: {compiled(of_tuple)(named)} entries inside, then {named.starts}")
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/run.py" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
Python, list: 4 entries inside, then [0, 10, 20, 99]
Python, tuple: 4 entries inside, then [0, 10, 20, 99]
Python, namedtuple: 4 entries inside, then [0, 10, 20, 99]
numba, list: 4 entries inside, then [0, 10, 20, 99]
numba, tuple: 4 entries inside, then [1, 2, 3]
numba, namedtuple: 4 entries inside, then [1, 2, 3]
SEEN
echo "as stated"
