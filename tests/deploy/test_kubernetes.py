"""Rules for deploy/kubernetes: valid by the schemas of Kubernetes, the same commands as in docker-compose.yml, and
nothing that runs as root."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy.deployment import OURS, ROOT, SERVICES

FOLDER = ROOT / "deploy" / "kubernetes"
VALIDATOR = "kubernetes-validate==1.37.0"  # with the schemas: 72 MB, so it is no requirement of ours


def pod(name: str) -> dict[str, Any]:
    """The pod of a Deployment."""
    objects = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


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
def test_it_runs_the_commands_of_compose(name: str) -> None:
    """With the same limits, and probes on the port and path that compose asks."""
    (container,), service = pod(name)["containers"], SERVICES[name]
    assert container["args"] == service["command"]
    limits = service["deploy"]["resources"]["limits"]
    assert container["resources"]["limits"] == {"cpu": limits["cpus"], "memory": limits["memory"].replace("g", "Gi")}
    (port,) = container["ports"]
    assert (
        f":{port['containerPort']}{container['readinessProbe']['httpGet']['path']}'"
        in service["healthcheck"]["test"][-1]
    )
    (variable,) = container["env"]
    assert variable["name"] in service["environment"]
    assert set(variable["valueFrom"]) == {"secretKeyRef"}  # the URL has a password


@pytest.mark.parametrize("name", OURS)
def test_no_container_can_become_root_or_write(name: str) -> None:
    found = pod(name)
    assert found["securityContext"]["runAsNonRoot"] is True
    assert f"{found['securityContext']['runAsUser']}:{found['securityContext']['runAsGroup']}" == SERVICES[name]["user"]
    assert found["automountServiceAccountToken"] is False
    (container,) = found["containers"]
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
