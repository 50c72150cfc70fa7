"""Stands in for `optpipe_server.compare_process` and answers at once; a diagnosis it refuses."""

from __future__ import annotations

import sys

compares = '"problem"' in sys.stdin.readline()
print('{"problem":"","options":{},"k":[],"rows":[]}' if compares else '{"refused":"no trace"}')
