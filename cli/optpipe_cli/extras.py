"""Optional packages: commands that need more than the plain install say so in a sentence."""

from __future__ import annotations

from importlib.util import find_spec

from optpipe.errors import InputError

NEEDS = {
    "runtime": ("torch", "httpx", "httpx_sse", "tenacity"),
    "server": ("fastapi", "prometheus_client", "sqlalchemy", "structlog", "uvicorn"),
}
WITHOUT_CUDA = " (with CUDA, 5 GB; without: first torch from an index of torch for CPUs, as docs/start.md says)"


def need(extra: str, *packages: str) -> None:
    """Raise `InputError` if the packages of this extra, or those of it that are named, are not installed."""
    missing = [name for name in packages or NEEDS[extra] if find_spec(name) is None]
    if missing:
        raise InputError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: pip install 'optpipe[{extra}]'"
            f"{WITHOUT_CUDA if 'torch' in missing else ''}"
        )
