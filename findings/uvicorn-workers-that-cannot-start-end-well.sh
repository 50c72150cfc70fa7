#!/usr/bin/env bash
# uvicorn 0.54.0: where the application's startup fails, the server exits with 3; with --workers 2 it ends, too, and exits with 0.
#
# Expected: 3 in both, as the log says "failed to start, stopping the parent process". Seen: a service manager that restarts what
# failed, or a script that goes on after what went well, takes it for a server that was asked to end.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check uvicorn==0.54.0
cat > "$folder/no_database.py" <<'PYTHON'
async def app(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "no database"})
PYTHON
for workers in 1 2; do
  code=0
  "$folder/venv/bin/uvicorn" --app-dir "$folder" --uds "$folder/socket" --workers $workers no_database:app 2>"$folder/log" || code=$?
  echo "$workers workers: exits with $code, $(grep "Application startup failed" "$folder/log" | sort -u)"
done | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
1 workers: exits with 3, ERROR:    Application startup failed. Exiting.
2 workers: exits with 0, ERROR:    Application startup failed. Exiting.
SEEN
echo "as stated"
