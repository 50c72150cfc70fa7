"""deploy's scripts by a tool's own checks, and those of Slurm on a real one with one node.

`make stacks ARGS=clusters` runs it. Slurm (slurmctld, slurmd, slurm-client) is not on PyPI: without it the test is
skipped.
"""

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
from support.deployment import ROOT
from support.processes import free_port, until

pytestmark = pytest.mark.stacks
BIN = Path(sys.executable).parent
SCRIPTS = ROOT / "deploy" / "slurm"
PROBLEM = ROOT / "examples" / "problems" / "slowlink-8x16.json"
LONG_S = 240.0
TRAINING = """
import sys, time
from optpipe import Problem
from optpipe_runtime import ScheduleClient
with ScheduleClient(None, Problem.load(sys.argv[1]).replace(name=""), time_limit_s=3) as client:
    while not client.ended:
        time.sleep(0.1)
    print("offered", client.poll().makespan_ms)
"""


PROGRAMS = ("slurmctld", "slurmd", "sbatch")
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


def found(name: str) -> str | None:
    """Where a program of Slurm's is; daemons are often not in a user's PATH."""
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
                command = [str(found(name)), "-D"]
                self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        until(
            lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T", check=False), f"a node in {folder}", LONG_S
        )

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        done = subprocess.run(command, env=self.environment | variables, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def close(self) -> None:
        """Ends all jobs, then the daemons."""
        self.run("scancel", "--user", getpass.getuser(), check=False)
        until(lambda: not self.run("squeue", "--noheader", check=False), "the jobs end", LONG_S)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    scripts = [*SCRIPTS.iterdir(), *(ROOT / "deploy").glob("*.sh")]
    done = subprocess.run([BIN / "shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    if missing := [name for name in PROGRAMS if not found(name)]:
        pytest.skip(f"{', '.join(missing)} not installed")
    with closing(Slurm(tmp_path)) as cluster:
        yield cluster


def test_a_training_finds_the_service_and_its_workers_on_slurm(
    cluster: Slurm, postgres_url: str, tmp_path: Path
) -> None:
    """The three scripts as they are. The job is called as Slurm calls the training, and a worker's task solved it."""
    scopes = ("me", "--scope", "submit", "--scope", "read")
    key = cluster.run(str(BIN / "optpipe"), "keys", "create", "--database", postgres_url, *scopes)
    port, logs = str(free_port()), f"--output={tmp_path}/%x-%j.log"
    common = {"PATH": f"{BIN}:{os.environ['PATH']}", "OPTPIPE_DATABASE": postgres_url, "OPTPIPE_PORT": port}
    submit = ("sbatch", "--parsable", f"--chdir={tmp_path}", logs)
    service = cluster.run(*submit, str(SCRIPTS / "service.sbatch"), **common)
    workers = cluster.run(*submit, "--array=0-1", str(SCRIPTS / "workers.sbatch"), **common)

    log = tmp_path / f"optpipe-service-{service}.log"
    until(lambda: log.exists() and "OPTPIPE_URL=" in log.read_text(), "the service says where it is", LONG_S)
    (said,) = (line for line in log.read_text().splitlines() if line.startswith("OPTPIPE_URL="))
    assert said.endswith(f":{port}")
    url = f"http://127.0.0.1:{port}"  # the name of this machine may lead elsewhere

    def ready() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
        return False

    until(ready, "the service is ready", LONG_S)
    (tmp_path / "train.py").write_text(TRAINING)
    found = {"OPTPIPE_URL": url, "OPTPIPE_KEY": key}
    words = ("--nodes=1", "--gpus-per-node=0", "--mem=2G", str(SCRIPTS / "train.sbatch"), "train.py", str(PROBLEM))
    training = cluster.run(*submit, *words, **{**common, **found})
    output = tmp_path / f"train-{training}.log"
    until(
        lambda: not cluster.run("squeue", "--noheader", f"--jobs={training}", check=False), "the training ends", LONG_S
    )
    assert "offered" in output.read_text()
    headers = {"Authorization": f"Bearer {key}"}
    (job,) = httpx.get(f"{url}/v1/jobs", headers=headers, trust_env=False).json()["jobs"]
    assert (job["problem_name"], job["state"]) == (f"slurm-{training}", "done")
    history = httpx.get(f"{url}/v1/jobs/{job['id']}/log", headers=headers, trust_env=False).text
    assert f"slurm-{workers}-" in history
