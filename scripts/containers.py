"""Builds the image and runs docker-compose.yml on a machine that reaches no image registry: `make containers`.

    sudo python scripts/containers.py FOLDER

needs root and Debian's packages (`PACKAGES`). Images and volumes are in FOLDER, which may be removed afterwards.

- Python's image is replaced by a minimal Debian from debootstrap, PostgreSQL's by Debian's package on it.
- docker-compose.yml runs as it stands, but for Prometheus, which is not started.
- A job is submitted. The worker that computes it is killed, and the other one has to finish it. Then the metrics are
  read, and everything is stopped.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parent.parent
PACKAGES = "podman runc netavark aardvark-dns iptables catatonit debootstrap python3-venv"
COMPOSE = "podman-compose==1.6.0"
MIRROR = "http://deb.debian.org/debian"
PYTHON, POSTGRES, OURS = (
    "docker.io/library/python:3.11-slim",
    "docker.io/library/postgres:18-bookworm",
    "optpipe-server",
)
CERTIFICATES = "/etc/ssl/certs"  # of this machine, which may stand behind a proxy with its own
SETTINGS = """\
[containers]
default_ulimits = []
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n'
# What compose relies on of PostgreSQL's image: the user 999, three variables, and the folder of the data. Its socket is
# in /tmp, because podman gives the tmpfs of /var/run/postgresql, below the link /var/run, to root.
POSTGRES_BUILD = f"""\
FROM {PYTHON}
RUN mkdir /etc/postgresql-common && echo create_main_cluster = false > /etc/postgresql-common/createcluster.conf
RUN apt-get update -q && apt-get install -qy --no-install-recommends postgresql
RUN ln -s /usr/lib/postgresql/*/bin /programs
RUN usermod --uid 999 postgres && groupmod --gid 999 postgres \
    && install -d -o 999 -g 999 /var/lib/postgresql
COPY start.sh /start.sh
ENV PATH=/programs:/usr/bin:/bin
USER 999:999
CMD ["sh", "/start.sh"]
"""
POSTGRES_START = """\
set -eu
data=/var/lib/postgresql/data
if [ ! -e $data/PG_VERSION ]; then
    initdb --pgdata=$data --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth=scram-sha-256 \\
        --encoding=UTF8
    echo "host all all all scram-sha-256" >> $data/pg_hba.conf
    echo "create database $POSTGRES_DB" | postgres --single -D $data postgres
fi
exec postgres -D $data -c listen_addresses='*' -c unix_socket_directories=/tmp
"""
LONG_S = 300.0
PROBLEM = ROOT / "examples" / "problems" / "slowlink-8x16.json"
SOLVES_S = 90


class Stack:
    """The containers of docker-compose.yml, with all that podman keeps in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.project = folder, folder / "project"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(SETTINGS.format(folder=folder))
        (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._environment = os.environ | {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "DISABLE_HC_SYSTEMD": "true",  # health checks are run by `_check_health`
            "OPTPIPE_ADDRESS": self.address,
        }

    def run(self, *words: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, and return what it has printed; what goes wrong is shown, and ends the script."""
        done = subprocess.run(
            [*map(str, words)], env=self._environment, capture_output=True, text=True, check=False, **options
        )
        if check and done.returncode:
            sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
        return done

    def podman(self, *words: object, check: bool = True) -> str:
        return self.run("podman", *words, check=check).stdout.strip()

    def compose(self, *words: object) -> str:
        program = self.folder / "tools" / "bin" / "podman-compose"
        return self.run(program, *words, cwd=self.project).stdout.strip()

    # Images

    def build(self) -> None:
        if not (self.folder / "tools" / "bin" / "podman-compose").exists():
            self.run(sys.executable, "-m", "venv", self.folder / "tools")
            self.run(self.folder / "tools" / "bin" / "pip", "install", "--quiet", COMPOSE)
        if self.run("podman", "image", "exists", PYTHON, check=False).returncode:
            self._debian()
        context = self.folder / "postgres"
        context.mkdir(exist_ok=True)
        (context / "Dockerfile").write_text(POSTGRES_BUILD)
        (context / "start.sh").write_text(POSTGRES_START)
        self.podman("build", "--network", "host", "--tag", POSTGRES, context)
        certificates = ("--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro")
        self.podman("build", "--network", "host", *certificates, "--tag", OURS, ROOT)

    def _debian(self) -> None:
        """A minimal Debian with its Python, where Python's image has it."""
        tree, packed = self.folder / "debian", self.folder / "debian.tar"
        shutil.rmtree(tree, ignore_errors=True)
        packages = "python3,python3-venv,ca-certificates"
        self.run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", tree, MIRROR)
        (tree / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        left_out = [f"--exclude=./{path}" for path in ("proc/*", "sys/*", "var/cache/apt/*", "var/lib/apt/lists/*")]
        self.run("tar", "--directory", tree, *left_out, "--create", "--file", packed, ".")
        self.podman("import", packed, PYTHON)
        packed.unlink()
        shutil.rmtree(tree)

    # Containers

    @contextmanager
    def running(self) -> Iterator[None]:
        """API, workers and database, started as docs/service.md says; all is stopped and removed afterwards."""
        shutil.rmtree(self.project, ignore_errors=True)
        hidden = self.project / "deploy" / "secrets"
        hidden.mkdir(parents=True, mode=0o700)
        shutil.copy(ROOT / "docker-compose.yml", self.project)
        (hidden / "postgres_password").write_text(secrets.token_urlsafe(32) + "\n")
        over = threading.Event()
        health = threading.Thread(target=self._check_health, args=(over,))
        health.start()
        try:
            self.compose("up", "--detach", "postgres")  # for which `run` of podman-compose does not wait
            wait(lambda: "(healthy)" in self.podman("ps", "--format", "{{.Status}}"), "the database is healthy")
            keys = ("run", "--rm", "-T", "api", "optpipe", "keys", "create")
            self.admin = self.compose(*keys, "prometheus", "--scope", "admin").splitlines()[-1]
            self.key = self.compose(*keys, "me", "--scope", "submit", "--scope", "read").splitlines()[-1]
            (hidden / "metrics_key").write_text(self.admin + "\n")
            self.compose("up", "--detach", "--scale", "worker=2", "api", "worker")  # it overlooks `replicas`
            yield
        finally:
            over.set()
            health.join()
            self.compose("down", "--volumes", "--timeout", "15")

    def _check_health(self, over: threading.Event) -> None:
        """What systemd does elsewhere: it is not there in every container or virtual machine."""
        while not over.wait(2):
            for name in self.podman("ps", "--format", "{{.Names}}", check=False).split():
                self.run("podman", "healthcheck", "run", name, check=False)

    def workers(self) -> dict[str, str]:
        """The name of each worker's container that runs, by its host name."""
        names = self.podman("ps", "--filter", "name=optpipe_worker", "--format", "{{.Names}}").split()
        return {self.podman("exec", name, "hostname"): name for name in names}

    def ask(self, path: str, key: str, body: Any = None) -> Any:
        """The API's answer; what it has as text if it is no JSON."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        with urlopen(Request(f"http://{self.address}{path}", content, headers), timeout=60) as answer:
            text = answer.read().decode()
        return json.loads(text) if "json" in answer.headers["Content-Type"] else text


def wait(true: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + LONG_S
    while True:
        try:
            if value := true():
                return value
        except URLError:  # not there yet
            pass
        if time.monotonic() > until:
            sys.exit(f"waited {LONG_S:g} s in vain: {what}")
        time.sleep(0.5)


def require(true: bool, what: str) -> None:
    print(f"{'yes' if true else 'NO '}  {what}", flush=True)
    if not true:
        sys.exit(1)


def run_a_job(stack: Stack) -> None:
    wait(lambda: stack.ask("/readyz", stack.key), "the API is ready")
    workers = wait(lambda: len(found := stack.workers()) == 2 and found, "two workers run")
    for name in ("optpipe_api_1", *workers.values()):
        user = stack.podman("exec", name, "id", "-u")
        refused = stack.run("podman", "exec", name, "touch", "/opt/optpipe/file", check=False)
        require(user == "10001" and "Read-only" in refused.stderr, f"{name}: user {user}, read-only file system")

    problem = json.loads(PROBLEM.read_text())
    job = stack.ask("/v1/jobs", stack.key, {"problem": problem, "time_limit_s": SOLVES_S, "gap": 0.0})

    def takers() -> list[str]:
        lines = stack.ask(f"{job['url']}/log", stack.key)["lines"]
        return [line["text"].split()[2] for line in lines if line["text"].startswith("taken by ")]

    first = wait(takers, "a worker takes the job")[0].rpartition("-")[0]
    wait(lambda: stack.podman("top", workers[first], "args").count("optpipe_solver"), "it computes")
    stack.podman("kill", "--signal", "KILL", workers[first])
    killed = time.monotonic()
    second = wait(lambda: len(found := takers()) > 1 and found, "another worker takes the job")[1].rpartition("-")[0]
    require(second in workers and second != first, f"{time.monotonic() - killed:.0f} s later {workers[second]} goes on")

    ended = wait(lambda: (now := stack.ask(job["url"], stack.key))["state"] not in ("queued", "running") and now, "end")
    require(ended["state"] == "done", f"the job ends: {ended['state']}, {ended['best']['makespan_ms']:.0f} ms")
    counted = stack.ask("/metrics", stack.admin).splitlines()
    require('optpipe_jobs{state="done"} 1.0' in counted, "the API counts it")
    script = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9101/metrics').read().decode())"
    metrics = stack.podman("exec", workers[second], "python", "-c", script).splitlines()
    require('optpipe_solve_seconds_count{state="done"} 1.0' in metrics, "so does the worker")


def main(folder: Path) -> None:
    missing = [name for name in ("podman", "runc", "iptables", "debootstrap") if shutil.which(name) is None]
    if missing or os.geteuid():
        what = f"{', '.join(missing)} not found" if missing else "not root"
        sys.exit(f"{what}: as root, after apt-get install --no-install-recommends {PACKAGES}")
    stack = Stack(folder.resolve())
    stack.build()
    size = int(stack.podman("image", "inspect", "--format", "{{.Size}}", OURS))
    base = int(stack.podman("image", "inspect", "--format", "{{.Size}}", PYTHON))
    require(True, f"the image is built: {size / 1e6:.0f} MB, of which its base has {base / 1e6:.0f} MB")
    with stack.running():
        run_a_job(stack)
    require(not stack.podman("ps", "--all", "--quiet"), "all is stopped and removed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
