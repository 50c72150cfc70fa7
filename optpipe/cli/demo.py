"""`optpipe demo`: the main job, small."""

from __future__ import annotations


def demo() -> None:
    """Train a small GPT under torchrun, solve beside it, swap better schedules in, show the gain."""
    from optpipe.cli.extras import need

    need("runtime")
    need("server")
    from optpipe_runtime.demo import run  # type: ignore[import-not-found, unused-ignore]

    run()
