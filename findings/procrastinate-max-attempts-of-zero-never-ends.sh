#!/usr/bin/env bash
# procrastinate 3.10.0: RetryStrategy(max_attempts=n) attempts a task n + 1 times, and with n = 0 without an end. The short form
# retry=n, which stands for it, attempts n + 1 times for each n, so retry=0 and RetryStrategy(max_attempts=0) are opposites.
#
# Expected: at most max_attempts attempts, as the name says, and none beyond the first for 0. Seen, with a task that would end
# at its twelfth attempt: it got there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check procrastinate==3.10.0
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null | tee "$folder/seen"
import asyncio

from procrastinate import App, RetryStrategy, testing


async def attempts(retry):
    app, count = App(connector=testing.InMemoryConnector()), 0

    @app.task(name="fails", retry=retry)
    async def fails():
        nonlocal count
        count += 1
        if count < 12:
            raise ValueError

    async with app.open_async():
        await fails.defer_async()
        await app.run_worker_async(wait=False, install_signal_handlers=False)
    return count


for n in 0, 1, 3:
    for name, retry in (f"retry={n}", n), (f"RetryStrategy(max_attempts={n})", RetryStrategy(max_attempts=n)):
        print(f"{name}: {asyncio.run(attempts(retry))} attempts")
PYTHON
diff - "$folder/seen" <<'SEEN'
retry=0: 1 attempts
RetryStrategy(max_attempts=0): 12 attempts
retry=1: 2 attempts
RetryStrategy(max_attempts=1): 2 attempts
retry=3: 4 attempts
RetryStrategy(max_attempts=3): 4 attempts
SEEN
echo "as stated"
