"""The files in deploy/: they parse, they say the same as the program, and their times fit together."""

import copy
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from outrider.platform.cli.main import build_parser
from outrider.platform.cli.options.api_keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from outrider.platform.cli.options.database_option import DATABASE_VARIABLE

VARIABLES = {DATABASE_VARIABLE, API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE, "OUTRIDER_OPTIONS"}
FLUSH_SECONDS = 10
"""After the drain: answers are sent, rows of the ledger written, the engine's process ended."""


@pytest.fixture(scope="module")
def deploy(repo_root) -> Path:
    return repo_root / "deploy"


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def parse(arguments: list[str]):
    """As the program would; SystemExit for an unknown option or a bad value."""
    return build_parser().parse_args(arguments)


# --- what is run ------------------------------------------------------------------------------------------------------


def test_nothing_installs_the_package_by_its_name(deploy):
    """No index has it: code registered under the name there would be run. A checkout or a wheel is a path."""
    installs = [
        line
        for file in sorted(deploy.rglob("*"))
        if file.is_file()
        for line in file.read_text().splitlines()
        if re.search(r"pip3? install", line)
    ]
    assert len(installs) >= 4
    by_name = re.compile(r"""install\b[^`]*[\s'"]outrider(?=[\s'"\[=<>~]|$)""")
    assert by_name.search("/opt/outrider/bin/pip install 'outrider[serve]'")
    assert [line for line in installs if by_name.search(line)] == []


def unit_lines(deploy: Path) -> list[tuple[str, str]]:
    text = (deploy / "systemd/outrider.service").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "["))]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


def unit_command(deploy: Path) -> list[str]:
    (command,) = [value for key, value in unit_lines(deploy) if key == "ExecStart"]
    return shlex.split(command.removesuffix(" $OUTRIDER_OPTIONS"))[1:]


def docker_commands(deploy: Path) -> list[list[str]]:
    text = (deploy / "docker/Dockerfile").read_text()
    return [shlex.split(found.replace(",", " ")) for found in re.findall(r"^CMD \[(.*)\]", text, re.M)]


def compose(deploy: Path) -> dict[str, Any]:
    """Its services; a folder that must be there when the program starts, and is in the image, is one that is here."""
    (content,) = documents(deploy / "compose/compose.yaml")
    services = content["services"]
    command = services["outrider"]["command"]
    services["outrider"]["command"] = [part.replace("/adapters", str(deploy)) for part in command]
    return services


def stateful_set(deploy: Path) -> dict[str, Any]:
    (content,) = documents(deploy / "kubernetes/base/statefulset.yaml")
    return content["spec"]["template"]["spec"]


def container(deploy: Path) -> dict[str, Any]:
    (content,) = stateful_set(deploy)["containers"]
    return content


def test_commands_of_the_images(deploy):
    commands = docker_commands(deploy)
    assert len(commands) == 2
    for command in commands:
        assert parse(command).host == "0.0.0.0"
    assert {parse(command).device for command in commands} == {"cpu", "cuda"}


def served(deploy) -> dict[str, tuple[Any, float]]:
    """Parsed command and seconds between SIGTERM and SIGKILL, of each way to deploy."""
    pod = stateful_set(deploy)
    stop = float(container(deploy)["lifecycle"]["preStop"]["exec"]["command"][1])
    unit = dict(unit_lines(deploy))
    return {
        "compose": (parse(compose(deploy)["outrider"]["command"]), seconds(compose(deploy)["outrider"])),
        "kubernetes": (parse(container(deploy)["args"]), pod["terminationGracePeriodSeconds"] - stop),
        "systemd": (parse(unit_command(deploy)), float(unit["TimeoutStopSec"].removesuffix("s"))),
    }


def seconds(service: dict[str, Any]) -> float:
    return float(service["stop_grace_period"].removesuffix("s"))


@pytest.mark.parametrize("kind", ["compose", "kubernetes", "systemd"])
def test_commands(deploy, kind):
    options, grace = served(deploy)[kind]
    assert grace >= options.shutdown_timeout + FLUSH_SECONDS  # the drain ends before the kill
    assert options.port == 8000
    assert options.max_num_queued_reqs
    assert str(options.journal).startswith("/var/lib/outrider")  # what survives a restart
    assert options.log_format == "json"


def test_unknown_options_would_be_noticed():
    with pytest.raises(SystemExit):
        parse(["serve", "--no-such-option"])


def test_further_options_of_the_kubernetes_gpu_variant(deploy):
    (content,) = documents(deploy / "kubernetes/cuda/kustomization.yaml")
    (patch,) = content["patches"]
    added = [step["value"] for step in yaml.safe_load(patch["patch"]) if step["path"].endswith("/args/-")]
    assert parse([*container(deploy)["args"], *added]).device == "cuda"


def test_variables_are_known(deploy):
    """A variable with a typing error would be ignored in silence."""
    for file in deploy.rglob("*"):
        if file.is_file() and "grafana" not in file.parts:
            found = set(re.findall(r"\bOUTRIDER_[A-Z_]+\w", file.read_text()))
            assert found <= VARIABLES, file


# --- the image --------------------------------------------------------------------------------------------------------


def test_the_image_has_extras_and_files_that_exist(deploy, repo_root):
    text = (deploy / "docker/Dockerfile").read_text()
    (extras,) = re.findall(r"'\.\[(.*)\]'", text)
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    ignored = (deploy / "docker/Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    for name in kept:
        assert (repo_root / name).exists(), name
    folders = {package.split(".")[1] for package in project["tool"]["setuptools"]["packages"] if "." in package}
    assert folders <= kept  # the package would be built without them
    assert re.search(r"^torch==", (repo_root / "constraints.txt").read_text(), re.M)  # what the image greps for


def test_images_run_without_rights(deploy):
    text = (deploy / "docker/Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.M)[1:]
    assert [stage.split(" AS ")[1].split()[0] for stage in stages] == ["build", "base", "cuda", "cpu"]
    assert re.findall(r"^USER (.*)", text, re.M)[-1] == "10001:10001"
    assert "USER root" not in text
    pod = stateful_set(deploy)["securityContext"]
    assert (pod["runAsNonRoot"], pod["runAsUser"]) == (True, 10001)
    limits = container(deploy)["securityContext"]
    assert limits["readOnlyRootFilesystem"]
    assert limits["capabilities"]["drop"] == ["ALL"]
    assert not limits["allowPrivilegeEscalation"]
    service = compose(deploy)["outrider"]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


def test_written_paths_have_volumes(deploy):
    """The root file system is read-only."""
    text = (deploy / "docker/Dockerfile").read_text()
    places = re.findall(r"(?:HF_HOME|XDG_CACHE_HOME|XDG_STATE_HOME)=(\S+)", text)
    assert len(places) == 3
    mounts = [mount["mountPath"] for mount in container(deploy)["volumeMounts"]]
    volumes = [volume.split(":")[1] for volume in compose(deploy)["outrider"]["volumes"]]
    for writable in (mounts, volumes):
        for place in places:
            assert any(place.startswith(mount) for mount in writable), place
    claims = yaml.safe_load((deploy / "kubernetes/base/statefulset.yaml").read_text())["spec"]["volumeClaimTemplates"]
    assert "state" in {claim["metadata"]["name"] for claim in claims}  # the journal's is kept


# --- probes -----------------------------------------------------------------------------------------------------------


def test_probes(deploy):
    """Paths that exist and that a full server answers; a start of the engine again must not end the pod."""
    from outrider.platform.http.observe.health import router
    from outrider.platform.http.protect.connections import _PROBES

    known = {route.path for route in router.routes}
    probes = {name: container(deploy)[name]["httpGet"]["path"] for name in container(deploy) if name.endswith("Probe")}
    assert probes == {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/version"}
    assert set(probes.values()) <= known
    assert set(probes.values()) <= set(_PROBES)
    (checked,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", (deploy / "docker/Dockerfile").read_text())
    assert checked in _PROBES


def test_the_database_is_awaited(deploy):
    services = compose(deploy)
    assert services["outrider"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert services["postgres"]["healthcheck"]["test"]
    (example,) = [line for line in (deploy / "compose/example.env").read_text().splitlines() if "=" in line]
    assert example == "POSTGRES_PASSWORD="  # no password is in the repository
    assert "${POSTGRES_PASSWORD:?" in services["outrider"]["environment"][DATABASE_VARIABLE]


# --- schemas ----------------------------------------------------------------------------------------------------------

KUBERNETES = ("1.30", "1.37")
"""Versions whose schemas the manifests meet."""


def patched(content: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """`content` after a JSON patch of `add` and `replace`."""
    content = copy.deepcopy(content)
    for step in steps:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        place: Any = content
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        if last == "-":
            place.append(step["value"])
        else:
            assert step["op"] == "add" or last in place
            place[last] = step["value"]
    return content


def manifests(deploy: Path) -> Iterator[dict[str, Any]]:
    """Objects of `kubernetes/base`, and the variant with a GPU."""
    (kustomization,) = documents(deploy / "kubernetes/base/kustomization.yaml")
    for name in kustomization["resources"]:
        yield from documents(deploy / "kubernetes/base" / name)
    (stateful_set,) = documents(deploy / "kubernetes/base/statefulset.yaml")
    (kustomization,) = documents(deploy / "kubernetes/cuda/kustomization.yaml")
    (patch,) = kustomization["patches"]
    yield patched(stateful_set, yaml.safe_load(patch["patch"]))


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_meet_the_schemas_of_kubernetes(deploy, version):
    """Strict: a field that Kubernetes does not know is an error."""
    found = list(manifests(deploy))
    assert len(found) == 6
    for content in found:
        assert kubernetes_validate.validate(content, version, strict=True) == version


def test_a_field_that_kubernetes_does_not_know_is_noticed(deploy):
    (content, *_) = manifests(deploy)
    content["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(content, KUBERNETES[-1], strict=True)


# --- with the tools themselves, if installed ------------------------------------------------------------------------


def test_kustomize(deploy):
    """Both variants are whole, and every selector meets the pods."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    for variant in ("base", "cuda"):
        built = subprocess.run(
            [kubectl, "kustomize", str(deploy / "kubernetes" / variant)], capture_output=True, text=True, check=True
        )
        objects = list(yaml.safe_load_all(built.stdout))
        kinds = sorted(item["kind"] for item in objects)
        assert kinds == ["NetworkPolicy", "PodDisruptionBudget", "Service", "Service", "StatefulSet"]
        labels = {"app.kubernetes.io/name": "outrider"}
        for item in objects:
            spec = item["spec"]
            selector = spec.get("podSelector", spec.get("selector"))
            assert selector.get("matchLabels", selector) == labels
            if item["kind"] == "StatefulSet":
                assert spec["template"]["metadata"]["labels"] == labels
                assert (
                    spec["template"]["spec"]["containers"][0]["image"] == f"outrider:{variant.replace('base', 'cpu')}"
                )


def test_systemd_analyze(deploy, tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "outrider.service"
    unit.write_text(
        (deploy / "systemd/outrider.service").read_text().replace("/opt/outrider/bin/outrider", "/bin/true")
    )
    verified = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True)
    about_ours = [line for line in verified.stderr.splitlines() if "outrider" in line]
    assert about_ours == []


def test_the_unit_keeps_persistent_folders(deploy):
    unit = dict(unit_lines(deploy))
    assert unit["KillMode"] == "mixed"  # the engine must not get the signal too
    assert unit["StateDirectory"] == "outrider"
    variables = dict(
        line.split("=", 1)
        for line in (deploy / "systemd/outrider.env").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert set(variables) == {DATABASE_VARIABLE, "OUTRIDER_OPTIONS"}
    assert "/var/lib/outrider/" in variables[DATABASE_VARIABLE]
