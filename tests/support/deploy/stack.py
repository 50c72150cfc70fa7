"""Starts what docker-compose.yml starts: the same commands and environment, with hosts and ports of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from support.deploy.deployment import ROOT, SERVICES, image_environment, image_packages
from support.ports import free_port
from support.service.postgres import Postgres

PASSWORD = "not a default: pass/word@1"  # with all that a URL would read otherwise
STARTS_S = 60.0


class Stack:
    """Containers are processes here. `name` is for example `worker-2` for the second worker."""

    def __init__(self, folder: Path, postgres: Postgres, database: str) -> None:
        self.secrets, self.scratch, self.missing = (folder / name for name in ("secrets", "tmp", "missing"))
        for made in (self.secrets, self.scratch, self.missing):
            made.mkdir()
        (self.secrets / "postgres_password").write_text(PASSWORD + "\n")
        self._postgres, self.database = postgres, database
        self._hide_what_the_image_lacks()
        self._log = folder / "logs"
        self._log.mkdir()
        self.ports: dict[tuple[str, str], int] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def _hide_what_the_image_lacks(self) -> None:
        """Hide packages of this environment that a container does not have."""
        held = image_packages() | {"optpipe", "pip", "setuptools"}
        for module, packages in packages_distributions().items():
            names = {re.sub(r"[-_.]+", "-", package).lower() for package in packages}
            if not names & held and module.isidentifier():
                (self.missing / f"{module}.py").write_text(
                    f"raise ModuleNotFoundError('not in the image: {module}', name='{module}')\n"
                )

    def port(self, name: str, inside: str) -> int:
        """The port of this machine that stands for the container's port."""
        return self.ports.setdefault((name, inside), free_port())

    def mapped(self, name: str, text: str) -> str:
        """A path, URL or port of a container, as it is on this machine."""
        text = re.sub(r"^/tmp\b", str(self.scratch), text)  # before any other, whose own paths may be below /tmp
        text = text.replace("/run/secrets/", f"{self.secrets}/").replace(
            "postgresql://optpipe@postgres/optpipe", self._url
        )
        return re.sub(r"(?<=127\.0\.0\.1:)(\d+)", lambda found: str(self.port(name, found[1])), text)

    @property
    def _url(self) -> str:
        return f"postgresql://optpipe@/{self.database}?host={self._postgres.folder}"

    def environment(self, name: str) -> dict[str, str]:
        """The environment of the image and the compose file, and nothing of this process's."""
        bin_ = Path(sys.executable).parent
        own = {**image_environment(), **SERVICES[name.partition("-")[0]].get("environment", {})}
        variables = {variable: self.mapped(name, value) for variable, value in own.items()}
        return variables | {"PATH": f"{bin_}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(self.missing)}

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """`docker compose run --rm NAME COMMAND`."""
        return subprocess.run(
            self._entered(command),
            env=self.environment(name),
            cwd=self.scratch,
            capture_output=True,
            text=True,
            timeout=STARTS_S,
            check=False,
        )

    def start(self, name: str) -> None:
        with (self._log / name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                self._entered(self.command(name)),
                env=self.environment(name),
                cwd=self.scratch,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def command(self, name: str) -> list[str]:
        """The compose file's command, with ports of this machine."""
        command: list[str] = [*SERVICES[name.partition("-")[0]]["command"]]
        for index, word in enumerate(command):
            if word in ("--port", "--metrics-port"):
                command[index + 1] = str(self.port(name, command[index + 1]))
        return command

    def _entered(self, command: Sequence[str]) -> list[str]:
        return [str(ROOT / "deploy" / "entrypoint.sh"), *command]

    def healthy(self, name: str) -> bool:
        """Run the health check's own command."""
        check = [self.mapped(name, word) for word in SERVICES[name.partition("-")[0]]["healthcheck"]["test"][1:]]
        return (
            subprocess.run(
                check, env=self.environment(name), capture_output=True, timeout=STARTS_S, check=False
            ).returncode
            == 0
        )

    def log(self, name: str) -> str:
        return (self._log / name).read_text()

    def stop(self, name: str) -> int:
        """`docker compose stop NAME`: return the exit status. The machine may be busy, so it gets 60 s at least."""
        process = self.running.pop(name)
        grace_s = float(SERVICES[name.partition("-")[0]]["stop_grace_period"].removesuffix("s"))
        process.terminate()
        try:
            return process.wait(max(60.0, grace_s))
        finally:
            _kill(process)

    def close(self) -> None:
        for process in self.running.values():
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
