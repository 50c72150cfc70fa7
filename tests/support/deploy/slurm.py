"""A real Slurm on this machine: slurmctld and slurmd with one node, as the user who runs the tests."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from support.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch")
STARTS_S = 60.0
SETTINGS = """ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=32 RealMemory=65536
PartitionName=all Nodes={host} Default=YES
"""


def missing() -> list[str]:
    """Those of Slurm's programs that are not installed; daemons are often not in a user's PATH."""
    return [name for name in PROGRAMS if _found(name) is None]


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Slurm:
    """The daemons; `run` calls one of Slurm's commands."""

    def __init__(self, folder: Path) -> None:
        for name in ("state", "spool"):
            (folder / name).mkdir()
        ports = {"controller": free_port(), "daemon": free_port()}
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        settings = folder / "slurm.conf"
        settings.write_text(SETTINGS.format(folder=folder, host=host, user=user, **ports))
        self.environment = os.environ | {"SLURM_CONF": str(settings)}
        self._daemons = []
        for name in ("slurmctld", "slurmd"):
            with (folder / f"{name}.log").open("wb") as log:
                command = [str(_found(name)), "-D"]
                self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        until = time.monotonic() + STARTS_S
        while "idle" not in self.run("sinfo", "--noheader", "--format=%T", check=False):
            assert time.monotonic() < until, (folder / "slurmctld.log").read_text()
            time.sleep(0.5)

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        done = subprocess.run(command, env=self.environment | variables, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def close(self) -> None:
        """Ends all jobs, then the daemons."""
        self.run("scancel", "--user", getpass.getuser(), check=False)
        until = time.monotonic() + STARTS_S
        while self.run("squeue", "--noheader", check=False) and time.monotonic() < until:
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()
