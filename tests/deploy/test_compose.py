"""Rules for docker-compose.yml and the Dockerfile. `make containers` builds the image and starts it."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest
from support.deploy.deployment import (
    COMPOSE,
    COMPOSE_TEXT,
    DOCKERFILE,
    OURS,
    ROOT,
    SCRAPED,
    SERVICES,
    image_environment,
    image_packages,
    instructions,
    interpolated,
)
from support.packages import with_what_they_need


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SERVICES[request.param]


def test_no_container_runs_as_root(service: dict[str, Any]) -> None:
    user, group = map(int, service["user"].split(":"))
    assert min(user, group) > 0
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}
    assert "docker.sock" not in str(service)


def test_file_systems_are_read_only_except_volumes_and_tmpfs(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert all(path.partition(":")[0] in ("/tmp", "/var/run/postgresql") for path in service["tmpfs"])
    for volume in service.get("volumes", []):
        source, _target, *mode = volume.split(":")
        assert source in COMPOSE["volumes"] or (mode == ["ro"] and (ROOT / source).is_file())


def test_every_container_has_limits(service: dict[str, Any]) -> None:
    limits = service["deploy"]["resources"]["limits"]
    assert float(limits["cpus"]) > 0
    assert re.fullmatch(r"\d+[mg]", limits["memory"])
    assert limits["pids"] > 0
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}


def test_every_container_has_a_health_check_and_restarts(service: dict[str, Any]) -> None:
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


def test_only_the_address_comes_from_the_environment() -> None:
    assert re.findall(r"\$\{?(\w+)", COMPOSE_TEXT) == ["OPTPIPE_ADDRESS"]


def test_only_the_api_and_prometheus_are_published_and_on_this_machine() -> None:
    published = {name: [interpolated(port) for port in service.get("ports", [])] for name, service in SERVICES.items()}
    assert published == {
        "api": ["127.0.0.1:8000:8000"],
        "worker": [],
        "postgres": [],
        "prometheus": ["127.0.0.1:9090:9090"],
    }


def test_the_database_is_in_an_internal_network() -> None:
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
        assert (
            scraped["authorization"]["credentials_file"].removeprefix("/run/secrets/")
            in SERVICES["prometheus"]["secrets"]
        )


def test_the_image_runs_as_the_user_of_the_compose_file_and_writes_below_tmp() -> None:
    assert instructions("USER") == [[SERVICES[name]["user"]] for name in OURS[:1]]
    assert SERVICES["api"]["user"] == SERVICES["worker"]["user"]
    environment = image_environment()
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert all(environment[name].startswith("/tmp") for name in ("HOME", "NUMBA_CACHE_DIR"))
    assert instructions("WORKDIR") == [["/tmp"]]


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
