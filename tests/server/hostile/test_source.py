"""What the service's source must not contain: ways to run or unpack what clients send, and requests to other hosts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import optpipe
import optpipe_cache
import optpipe_server

UNPACKS = {
    "pickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "ctypes",
    "cffi",
    "code",
    "pty",
    "runpy",
}
ASKS = {
    "httpx",
    "requests",
    "aiohttp",
    "urllib3",
    "urllib.request",
    "http.client",
    "ftplib",
    "smtplib",
    "poplib",
    "imaplib",
    "xmlrpc",
}
ASKS |= {"webbrowser", "websockets", "paramiko"}
RUNS = {"eval", "exec", "compile", "__import__"}
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}
CONNECTS = {"create_connection", "open_connection", "open_unix_connection", "connect_ex", "sendto", "urlopen"}
# Their `connect` goes to the configured URL.
DATABASES = {"DeadlineConnection", "engine", "self.engine", "self._engine", "self._reading", "sqlite3"}


def violations(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _imports(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                node.module for alias in node.names if _imports(node.module) or _imports(f"{node.module}.{alias.name}")
            )
            yield from (
                alias.name
                for alias in node.names
                if alias.name in SHELLS | CONNECTS or _replaces(f"{node.module}.{alias.name}")
            )
        elif isinstance(node, ast.Name) and node.id in RUNS:
            yield node.id
        elif isinstance(node, ast.Attribute) and (node.attr in SHELLS | CONNECTS or _replaces(ast.unparse(node))):
            yield node.attr
        elif isinstance(node, ast.Attribute) and node.attr == "connect" and ast.unparse(node.value) not in DATABASES:
            yield ast.unparse(node)
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "shell"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        ):
            yield "shell"


def _replaces(name: str) -> bool:
    return name.startswith(("os.exec", "os.spawn", "os.posix_spawn"))


def _imports(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in UNPACKS | ASKS)


FILES = [
    file
    for package in (optpipe_server, optpipe_cache, optpipe)
    for file in sorted(Path(package.__file__ or "").parent.rglob("*.py"))
    # The rest of the core is for people at a terminal: commands, pictures, and the bench, a client of the service.
    if not {"cli", "show", "bench"} & set(file.parts)
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-3:]))
def test_source(file: Path) -> None:
    assert not list(violations(file.read_text()))


def test_the_files_are_found() -> None:
    names = {"/".join(file.parts[-2:]) for file in FILES}
    assert {"http/auth.py", "database/jobs.py", "optpipe_cache/cache.py", "process/child.py"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml.cyaml",
        "import urllib.request",
        "from urllib import request",
        "import os.path, requests",
        "eval('1')",
        "run = exec",
        "os.system('ls')",
        "from os import popen",
        "from os import execv",
        "os.execv('ls', [])",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=maybe)",
        "socket.create_connection(('a', 1))",
        "from asyncio import open_connection",
        "s.connect(('a', 1))",
    ],
)
def test_forbidden_code_is_found(source: str) -> None:
    assert list(violations(source))


def test_allowed_code_is_not_reported() -> None:
    assert not list(
        violations(
            "with self.engine.connect() as db: db.execute(q)\nsqlite3.connect(f)\nre.match(p, s)\nfrom "
            "urllib.parse import urlsplit"
        )
    )
