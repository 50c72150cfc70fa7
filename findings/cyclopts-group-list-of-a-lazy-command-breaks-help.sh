#!/usr/bin/env bash
# cyclopts 5.5.2: a command that is named by its import path ("module:function") and has its groups as a list is registered,
# and runs, but --help of the whole program ends with a TypeError without a message. A tuple works, and a list works where the
# command is a function.
#
# Expected: a list is a sequence of groups in both. Seen: the error comes only when somebody asks for help.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check cyclopts==5.5.2
cat > "$folder/commands.py" <<'PYTHON'
def run():
    """Run."""
    print("ran")
PYTHON
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null | tee "$folder/seen"
import contextlib
import io

import commands
from cyclopts import App, Group

tasks = Group("Tasks")
for what, command in ("lazy", "commands:run"), ("function", commands.run):
    for groups in [tasks], (tasks,):
        for tokens in ["run"], ["--help"]:
            app, written = App(name="tool", result_action="return_value"), io.StringIO()
            app.command(command, name="run", group=groups)
            try:
                with contextlib.redirect_stdout(written):
                    app(tokens)
                ended = "ran" if "ran" in written.getvalue() else "help with Tasks" if "Tasks" in written.getvalue() else "?"
            except TypeError as error:
                ended = f"TypeError({str(error)!r})"
            print(f"{what}, group as a {type(groups).__name__}, {tokens[0]}: {ended}")
PYTHON
diff - "$folder/seen" <<'SEEN'
lazy, group as a list, run: ran
lazy, group as a list, --help: TypeError('')
lazy, group as a tuple, run: ran
lazy, group as a tuple, --help: help with Tasks
function, group as a list, run: ran
function, group as a list, --help: help with Tasks
function, group as a tuple, run: ran
function, group as a tuple, --help: help with Tasks
SEEN
echo "as stated"
