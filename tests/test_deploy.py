"""The files in `examples/deploy`: what they name is there, and the programs that read them take them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config import Config, load, settings
from server.routes import ROUTERS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VARIABLES = {row.env for row in settings()}
PATHS = {getattr(route, "path", "") for router in ROUTERS for route in router.routes}


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def manifests() -> list[dict[str, Any]]:
    names = read("kubernetes/kustomization.yaml")["resources"]
    return [one for name in names for one in yaml.safe_load_all((KUBERNETES / name).read_text())]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


@pytest.mark.parametrize("file", sorted(file for file in DEPLOY.rglob("*") if file.is_file()))
def test_every_variable_is_a_setting(file: Path) -> None:
    named = set(re.findall(r"\bANTIPHON_[A-Z_]+", file.read_text()))
    assert named <= VARIABLES, named - VARIABLES


def instructions() -> list[tuple[str, str]]:
    """What the Dockerfile says, continued lines joined: (instruction, the rest)."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = filter(None, map(str.strip, text.replace("\\\n", " ").splitlines()))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_is_built_from_what_is_there() -> None:
    stages: list[str] = []
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for instruction, rest in instructions():
        words = shlex.split(rest)
        if instruction == "FROM":
            assert words[0] == "${BASE}" or words[0] in stages
            stages.append(words[-1])
        elif instruction == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        elif instruction == "COPY":
            for source in words[:-1]:
                assert (ROOT / source).exists(), source
                assert "wheel" not in stages[-1] or f"!{source.removeprefix('./')}" in ignored
    assert stages[-2:] == ["cuda", "cpu"]


def test_both_images_run_a_server_without_rights_that_says_how_it_is() -> None:
    ends = re.split(
        r"^FROM system AS (?:cuda|cpu)\n", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    cuda, cpu = (end.split("\n", 1)[1] for end in ends[-2:])
    assert cuda.strip() == cpu.strip(), "they differ by their environment only"
    said = dict(line.split(maxsplit=1) for line in cpu.splitlines() if line)
    assert said["USER"] == "antiphon" and said["STOPSIGNAL"] == "SIGTERM"
    assert said["ENTRYPOINT"] == '["antiphon"]' and "/ready" in said["HEALTHCHECK"] and "/ready" in PATHS


def test_compose_has_two_servers_on_one_database_behind_a_proxy() -> None:
    compose = read("compose.yaml")
    services = compose["services"]
    assert set(services) == {"database", "antiphon", "proxy", "searxng"}
    server = services["antiphon"]
    assert server["deploy"]["replicas"] == 2
    built = server["build"]
    assert (DEPLOY / built["context"] / built["dockerfile"]).is_file()
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith("./") else source in compose["volumes"]
    (network,) = compose["networks"]["default"]["ipam"]["config"]
    assert server["environment"]["ANTIPHON_TRUSTED_PROXY"] == network["subnet"]
    grace = float(server["stop_grace_period"].removesuffix("s"))
    assert grace > Config().drain_grace_s


def test_the_settings_of_compose_are_taken(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "antiphon.toml", tmp_path)
    environment = {
        name: value.replace("${POSTGRES_PASSWORD}", "secret").split("${")[0] or "sk-1"
        for name, value in read("compose.yaml")["services"]["antiphon"]["environment"].items()
    }
    loaded = load({}, {**environment, "ANTIPHON_DATA": str(tmp_path)})
    assert not list(loaded.warnings()) and loaded.config.web.provider == "searxng"
    assert "json" in read("searxng/settings.yml")["search"]["formats"]


def test_kubernetes_probes_what_is_there_and_waits_long_enough() -> None:
    by_kind = {one["kind"]: one for one in manifests()}
    assert set(by_kind) == {"Deployment", "Service", "PodDisruptionBudget"}
    spec = by_kind["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert set(paths.values()) <= PATHS
    assert pod["terminationGracePeriodSeconds"] > Config().drain_grace_s + 5
    user = next(rest for name, rest in instructions() if name == "RUN" and "useradd" in rest)
    assert f"--uid {pod['securityContext']['runAsUser']} " in user
    labels = spec["template"]["metadata"]["labels"]
    for selector in (
        spec["selector"]["matchLabels"],
        by_kind["Service"]["spec"]["selector"],
        by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert by_kind["PodDisruptionBudget"]["spec"]["minAvailable"] < spec["replicas"]


def test_kustomize_takes_the_manifests() -> None:
    done = subprocess.run(
        [program("kubectl"), "kustomize", str(KUBERNETES)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert {one["metadata"]["namespace"] for one in built} == {"antiphon"} and len(built) == len(manifests())


def unit(section: str) -> dict[str, str]:
    text = (DEPLOY / "antiphon.service").read_text().split(f"[{section}]\n")[1].split("\n[")[0]
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def test_the_unit_is_told_by_the_server_how_it_is() -> None:
    service = unit("Service")
    assert service["Type"] == "notify" and service["NotifyAccess"] == "main"
    assert float(service["TimeoutStopSec"]) > Config().drain_grace_s
    assert (
        "serve --data /var/lib/antiphon" in service["ExecStart"] and service["StateDirectory"] == "antiphon"
    )


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With programs that are there in the place of those that it names."""
    text = (DEPLOY / "antiphon.service").read_text()
    (tmp_path / "antiphon.service").write_text(
        text.replace("/opt/antiphon/bin/antiphon", shutil.which("true") or "")
    )
    done = subprocess.run(
        [program("systemd-analyze"), "verify", "--man=no", str(tmp_path / "antiphon.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "antiphon.service" not in done.stderr, done.stderr


def test_nginx_takes_the_proxys_settings(tmp_path: Path) -> None:
    """Looking names up again needs nginx 1.27.3; what older ones have is tried without."""
    text = (DEPLOY / "nginx.conf").read_text()
    text = re.sub(r"^\s*resolver .*\n", "", text, flags=re.MULTILINE).replace(" resolve ", " ")
    (tmp_path / "default.conf").write_text(text.replace("antiphon:8000", "127.0.0.1:8000"))
    http = f"access_log off; include {tmp_path}/default.conf;"
    main = f"pid {tmp_path}/pid; error_log stderr; events {{}} http {{ {http} }}"
    (tmp_path / "nginx.conf").write_text(main)
    command = [program("nginx"), "-t", "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "syntax is ok" in done.stderr, done.stderr
