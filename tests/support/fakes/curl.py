"""As much of curl as docs/service.md uses, for machines that have none."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import httpx


def main() -> int:
    parser = argparse.ArgumentParser()
    for flag in ("-f", "-s", "-S", "-N"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-X")
    parser.add_argument("-d")
    parser.add_argument("--max-time", type=float, default=600.0)
    parser.add_argument("url")
    asked = parser.parse_args()
    body = asked.d and (Path(asked.d[1:]).read_text().replace("\n", "") if asked.d.startswith("@") else asked.d)
    headers = dict(header.split(": ", 1) for header in asked.H)
    until = time.monotonic() + asked.max_time
    method = asked.X or ("POST" if body else "GET")
    with httpx.stream(
        method, asked.url, content=body, headers=headers, timeout=asked.max_time, trust_env=False
    ) as reply:
        if asked.f and reply.status_code >= 400:
            print(f"curl: (22) The requested URL returned error: {reply.status_code}", file=sys.stderr)
            return 22
        for chunk in reply.iter_bytes():
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            if time.monotonic() > until:
                return 28
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except httpx.HTTPError as error:
        print(f"curl: {error}", file=sys.stderr)
        sys.exit(7)
