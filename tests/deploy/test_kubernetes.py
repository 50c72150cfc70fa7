"""Rules for deploy/kubernetes: the same commands as in docker-compose.yml, and nothing that runs as root."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from support.deployment import OURS, ROOT, SERVICES

FOLDER = ROOT / "deploy" / "kubernetes"


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
