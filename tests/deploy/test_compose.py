"""Rules for docker-compose.yml, the Dockerfile and deploy/kubernetes. `make containers` starts them."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deployment import (
    COMPOSE,
    COMPOSE_TEXT,
    DOCKERFILE,
    OURS,
    ROOT,
    SCRAPED,
    SERVICES,
    build_commands,
    image_environment,
    image_packages,
    instructions,
    with_what_they_need,
)

from optpipe import solvers


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SERVICES[request.param]


def test_a_container_has_few_rights_limits_and_a_health_check(service: dict[str, Any]) -> None:
    user, group = map(int, service["user"].split(":"))
    assert min(user, group) > 0
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}
    assert "docker.sock" not in str(service)
    assert service["read_only"] is True
    assert all(path.partition(":")[0] in ("/tmp", "/var/run/postgresql") for path in service["tmpfs"])
    for volume in service.get("volumes", []):
        source, _target, *mode = volume.split(":")
        assert source in COMPOSE["volumes"] or (mode == ["ro"] and (ROOT / source).is_file())
    limits = service["deploy"]["resources"]["limits"]
    assert float(limits["cpus"]) > 0
    assert re.fullmatch(r"\d+[mg]", limits["memory"])
    assert limits["pids"] > 0
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    check = service["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "start_period"} <= check.keys()
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True  # a first process that reaps what others leave behind


def test_passwords_come_from_files_that_are_nowhere_in_the_repository(service: dict[str, Any]) -> None:
    for name, value in service.get("environment", {}).items():
        if re.search(r"(?i)password|secret|key|token", name):
            assert name.endswith("_FILE")
            assert value.removeprefix("/run/secrets/") in service["secrets"]
        assert not re.search(r"://[^/@]*:[^/@]*@", value)
    for name in service.get("secrets", []):
        assert COMPOSE["secrets"][name].keys() == {"file"}
        assert COMPOSE["secrets"][name]["file"].startswith("./deploy/secrets/")
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_what_is_published_and_which_network_is_whose() -> None:
    assert re.findall(r"\$\{?(\w+)", COMPOSE_TEXT) == ["OPTPIPE_ADDRESS"]
    published = {
        name: [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", port) for port in service.get("ports", [])]
        for name, service in SERVICES.items()
    }
    assert published == {
        "api": ["127.0.0.1:8000:8000"],
        "worker": [],
        "postgres": [],
        "prometheus": ["127.0.0.1:9090:9090"],
    }
    assert SERVICES["postgres"]["networks"] == ["database"]
    assert COMPOSE["networks"]["database"] == {"internal": True}
    assert "database" not in SERVICES["prometheus"]["networks"]
    assert "outside" not in SERVICES["worker"]["networks"]


@pytest.mark.parametrize("scraped", SCRAPED, ids=lambda scraped: scraped["job_name"])
def test_prometheus_scrapes_existing_ports(scraped: dict[str, Any]) -> None:
    name = scraped["job_name"]
    port = {"api": "--port", "worker": "--metrics-port"}[name]
    listens = SERVICES[name]["command"][SERVICES[name]["command"].index(port) + 1]
    targets = [target for found in scraped.get("static_configs", []) for target in found["targets"]]
    targets += [
        f"{service}:{found['port']}" for found in scraped.get("dns_sd_configs", []) for service in found["names"]
    ]
    assert targets == [f"{name}:{listens}"]
    assert set(SERVICES[name]["networks"]) & set(SERVICES["prometheus"]["networks"])
    if name == "api":
        file = scraped["authorization"]["credentials_file"]
        assert file.removeprefix("/run/secrets/") in SERVICES["prometheus"]["secrets"]


def test_the_image_runs_as_the_user_of_the_compose_file_and_writes_below_tmp() -> None:
    assert instructions("USER") == [[SERVICES[name]["user"]] for name in OURS[:1]]
    assert SERVICES["api"]["user"] == SERVICES["worker"]["user"]
    environment = image_environment()
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert all(environment[name].startswith("/tmp") for name in ("HOME", "NUMBA_CACHE_DIR"))
    assert instructions("WORKDIR") == [["/tmp"]]


def test_a_container_begins_with_what_the_image_has_compiled(tmp_path: Path) -> None:
    """For the same CPU, in a folder that numba can write."""
    (words,) = [words for words in build_commands() if solvers.installed().COMPILE in words]
    built, runs = dict(word.split("=") for word in words if "=" in word), image_environment()
    assert built["NUMBA_CPU_NAME"] == runs["NUMBA_CPU_NAME"] == "generic"
    (entrypoint,) = instructions("ENTRYPOINT")[0]
    assert Path(entrypoint.strip("[]")).parent == Path(built["NUMBA_CACHE_DIR"]).parent
    shutil.copy(ROOT / "deploy/entrypoint.sh", tmp_path)
    (tmp_path / "compiled" / "loops").mkdir(parents=True)
    (tmp_path / "compiled" / "loops" / "code").write_text("x")
    for _ in range(2):  # a container that is started again has it already
        command = [tmp_path / "entrypoint.sh", "cat", tmp_path / "numba" / "loops" / "code"]
        assert subprocess.check_output(command, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba")}) == b"x"


def test_the_image_is_made_of_files_that_are_sent_to_the_build() -> None:
    froms = [words[1] for words in DOCKERFILE if words[0] == "FROM"]
    assert set(froms) == {"python:3.11-slim"}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    sent = [line[1:] for line in ignored if line.startswith("!")]
    copied = [
        word for words in DOCKERFILE if words[0] == "COPY" for word in words[1:-1] if not word.startswith(("--", "/"))
    ]
    for path in copied:
        assert (ROOT / path).exists()
        assert any(fnmatch.fnmatch(path, pattern) for pattern in sent)
    assert not any(line.startswith("!") and "secrets" in line for line in ignored)


def test_the_image_has_no_torch() -> None:
    assert {"fastapi", "psycopg", "sqlalchemy", "ortools", "numba"} <= image_packages()
    assert "torch" in with_what_they_need("optpipe[runtime]")  # what would be found
    assert [package for package in image_packages() if re.match("torch|nvidia|triton|pixeltable", package)] == []


FOLDER = ROOT / "deploy" / "kubernetes"
VALIDATOR = "kubernetes-validate==1.37.0"  # with the schemas: 72 MB, so it is no requirement of ours


def pod(name: str) -> dict[str, Any]:
    objects = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    return deployment["spec"]["template"]["spec"]


def test_kustomize_takes_every_file() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert sorted(listed) == sorted(path.name for path in FOLDER.iterdir() if path.name != "kustomization.yaml")


def test_the_schemas_of_kubernetes_take_every_object(tmp_path: Path) -> None:
    """As files, and as kustomize builds them where kubectl is there. A field that does not exist is refused."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "tools"], check=True)
    programs = tmp_path / "tools" / "bin"
    subprocess.run([programs / "pip", "install", "--quiet", VALIDATOR], check=True)
    files = [FOLDER / f"{name}.yaml" for name in OURS]
    if shutil.which("kubectl"):
        built = tmp_path / "built.yaml"
        built.write_bytes(subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, check=True).stdout)
        files.append(built)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(files[0].read_text().replace("readOnlyRootFilesystem", "readOnlyFilesystem"))

    def validated(*paths: Path) -> tuple[int, str]:
        command = [programs / "kubernetes-validate", "--strict", *paths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    status, told = validated(*files)
    assert status == 0, told
    assert told.count(" passed ") == 3 * (len(files) - 1)  # two Deployments and a Service
    status, told = validated(wrong)
    assert status != 0
    assert "readOnlyFilesystem" in told


@pytest.mark.parametrize("name", OURS)
def test_it_runs_the_commands_of_compose_and_cannot_become_root_or_write(name: str) -> None:
    """With the same limits, and probes on the port and path that compose asks."""
    found, service = pod(name), SERVICES[name]
    (container,) = found["containers"]
    assert container["args"] == service["command"]
    limits = service["deploy"]["resources"]["limits"]
    assert container["resources"]["limits"] == {"cpu": limits["cpus"], "memory": limits["memory"].replace("g", "Gi")}
    (port,) = container["ports"]
    path = container["readinessProbe"]["httpGet"]["path"]
    assert f":{port['containerPort']}{path}'" in service["healthcheck"]["test"][-1]
    (variable,) = container["env"]
    assert variable["name"] in service["environment"]
    assert set(variable["valueFrom"]) == {"secretKeyRef"}  # the URL has a password
    assert found["securityContext"]["runAsNonRoot"] is True
    assert f"{found['securityContext']['runAsUser']}:{found['securityContext']['runAsGroup']}" == service["user"]
    assert found["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
