"""What is shipped for containers, systemd and Kubernetes, as far as it runs without them."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import trustme
import typer
import yaml
from dockerfile_parse import DockerfileParser
from typer.testing import CliRunner

from prefixcache.model.default_model import PACKAGE, VERSION
from prefixcache_service.cli import app
from prefixcache_service.ports import advertised
from prefixcache_service.tls import TlsFiles
from tests.service.conftest import RunningServer
from tests.service.process import Process

ROOT = Path(__file__).parents[2]
MANIFESTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/prefixcache.yaml").read_text()))
UNIT = ROOT / "deploy/systemd/prefixcache.service"
SETTINGS = ROOT / "deploy/systemd/serve.toml"
KUBERNETES = "1.34"


def parsed(arguments):
    """The parameters of a command line of ours, in full; raises where it has none."""
    name, *flags = arguments
    command = typer.main.get_command(app).commands[name]
    return command.make_context(name, list(flags)).params


def of_kind(kind):
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


@pytest.fixture
def pod():
    (workload,) = of_kind("StatefulSet")
    return workload["spec"]["template"]["spec"]


@pytest.fixture
def container(pod):
    (container,) = pod["containers"]
    return container


# -------------------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_manifests_are_what_kubernetes_knows(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_validator_sees_what_is_wrong(pod):
    (workload,) = of_kind("StatefulSet")
    for spoiled in (
        {**workload, "spec": {**workload["spec"], "replica": 3}},
        {**workload, "spec": {**workload["spec"], "replicas": "three"}},
        {
            **workload,
            "spec": {**workload["spec"], "template": {"spec": {**pod, "containers": None}}},
        },
    ):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(spoiled, KUBERNETES, strict=True)


def test_the_arguments_of_the_pod_are_ours(container):
    flags = parsed(container["args"])
    known = {"POD_NAME": "prefixcache-0", "POD_NAMESPACE": "default"}
    assert {one["name"] for one in container["env"]} == set(known)
    where = flags["advertise_address"]
    for name, value in known.items():
        where = where.replace(f"$({name})", value)
    (workload,) = of_kind("StatefulSet")
    headless = workload["spec"]["serviceName"]
    assert where == f"prefixcache-0.{headless}.default.svc.cluster.local:{flags['port']}"
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"grpc": flags["port"], "http": flags["http_port"]}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert flags["tokens"].parent == Path(mounts["tokens"])


def test_probes_ask_grpc_health_on_the_port_that_is_served(container):
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"] == {"port": parsed(container["args"])["port"]}


def test_services_find_the_pods_and_replicas_have_names():
    (workload,) = of_kind("StatefulSet")
    labels = workload["spec"]["template"]["metadata"]["labels"]
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind("Service")}
    assert all(spec["selector"] == labels for spec in services.values())
    replicas = services.pop(workload["spec"]["serviceName"])
    assert replicas["clusterIP"] == "None"
    assert replicas["publishNotReadyAddresses"]  # one that drains still holds sequences
    (clients,) = services.values()
    assert [port["name"] for port in clients["ports"]] == ["grpc"]
    for other in (*of_kind("PodDisruptionBudget"), *of_kind("NetworkPolicy")):
        spec = other["spec"]
        chosen = spec.get("selector") or spec["podSelector"]
        assert chosen["matchLabels"] == labels


def test_a_pod_has_longer_to_stop_than_its_calls(pod, container):
    grace = parsed(container["args"])["grace"]
    forgotten = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > forgotten + grace + 1


def test_pods_may_do_nothing_that_they_need_not(pod, container):
    assert pod["securityContext"]["runAsNonRoot"]
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False


# -------------------------------------------------------------------------------- containers


class Image:
    """The Containerfile, read as far as the tests need it."""

    def __init__(self):
        parser = DockerfileParser(fileobj=(ROOT / "Containerfile").open("rb"))
        self.steps = [(step["instruction"], step["value"]) for step in parser.structure]
        parser.fileobj.close()

    def values(self, instruction):
        return [value for name, value in self.steps if name == instruction]

    def environment(self):
        pairs = (shlex.split(value) for value in self.values("ENV"))
        return dict(pair.split("=", 1) for some in pairs for pair in some)


@pytest.fixture(scope="module")
def image():
    return Image()


def test_commands_of_the_image_are_ours(image):
    assert image.values("ENTRYPOINT") == ['["prefixcache"]']
    (command,) = image.values("CMD")
    assert parsed(yaml.safe_load(command))["host"] == "127.0.0.1"
    (check,) = image.values("HEALTHCHECK")
    options, _, command = check.partition("CMD")
    program, *arguments = yaml.safe_load(command)
    patience = float(re.search(r"--timeout=(\d+)s", options)[1])
    assert program == "prefixcache"
    assert parsed(arguments)["timeout"] < patience
    pulled = [step for step in image.values("RUN") if "prefixcache pull" in step]
    assert all(f"{PACKAGE}=={VERSION}" in step for step in pulled)
    assert parsed(["pull"])["model"] == "smollm2"


def test_there_is_an_image_for_each_of_cpu_and_cuda(image):
    stages = [value.split() for value in image.values("FROM")]
    names = [stage[2] for stage in stages]
    assert {"cpu", "cuda"} <= set(names)
    assert all(stage[0] in names or stage[0] == "${BASE}" for stage in stages)
    copied = [value.split()[:-1] for value in image.values("COPY") if "--from" not in value]
    assert all((ROOT / name).exists() for names in copied for name in names)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (chosen,) = {value.partition("=")[2] for value in image.values("ARG") if "EXTRAS" in value}
    assert set(chosen.split(",")) <= set(extras)
    requirement = next(v for v in image.values("RUN") if "--index-url" in v)
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert re.search(r'"(torch[^"]+)"', requirement)[1] in pinned


def test_the_image_its_volume_and_the_pod_agree(image, pod, container):
    (user,) = image.values("USER")
    context = pod["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert f"--uid {context['runAsUser']} " in " ".join(image.values("RUN"))
    (volume,) = image.values("VOLUME")
    environment = image.environment()
    assert environment["PREFIXCACHE_HOME"] == volume
    assert all(environment[name].startswith(volume) for name in ("HF_HOME", "TRITON_CACHE_DIR"))
    assert volume in {mount["mountPath"] for mount in container["volumeMounts"]}
    (ports,) = image.values("EXPOSE")
    assert ports.split() == [str(port["containerPort"]) for port in container["ports"]]


def test_the_build_context_has_what_is_copied(image):
    """`.dockerignore` is the one name that Docker, Podman and Buildah all read."""
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {name for value in image.values("COPY") for name in value.split()[:-1]}
    assert {f"!{name}" for name in copied if not name.startswith(("--", "/"))} <= set(kept)


# -------------------------------------------------------------------------------- systemd


def unit():
    pairs = (line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line[1:])
    return {name: value for name, value in pairs if not name.startswith("#")}


def test_the_unit_runs_our_commands_and_waits_longer_than_the_grace():
    settings = unit()
    program, *arguments = shlex.split(settings["ExecStart"])
    assert Path(program).name == "prefixcache"
    assert arguments == ["serve", "--config", f"/etc/prefixcache/{SETTINGS.name}"]
    flags = parsed(["serve", "--config", str(SETTINGS)])
    assert int(settings["TimeoutStopSec"]) > flags["grace"] + 1
    assert Path(shlex.split(settings["ExecStartPre"])[0]) == Path(program)
    assert parsed(shlex.split(settings["ExecStartPre"])[1:])


def test_what_the_settings_suggest_for_others_is_known_too(tmp_path):
    text = re.sub(r"^# (?=[a-z-]+ = )", "", SETTINGS.read_text(), flags=re.MULTILINE)
    text = text.replace('host = "127.0.0.1"\nport', "port")  # named again below
    (tmp_path / "serve.toml").write_text(text)
    flags = parsed(["serve", "--config", str(tmp_path / "serve.toml")])
    assert (flags["host"], flags["grace"]) == ("0.0.0.0", 60.0)
    assert flags["tls_key"] == Path("/etc/prefixcache/server.key")
    assert flags["advertise_address"].endswith(":50051")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace("/opt/prefixcache/bin/prefixcache", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(here)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, ours) == (0, [])
    here.write_text(here.read_text().replace("Restart=on-failure", "Restart=sometimes"))
    spoiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "restart" in spoiled.stderr


# -------------------------------------------------------------------------------- health


def health(*arguments):
    return CliRunner().invoke(app, ["health", *arguments])


def test_health_is_the_exit_code(server, tiny_config):
    said = health("--server", server.target)
    assert (said.exit_code, said.stdout) == (0, "SERVING\n")
    loading = RunningServer(tiny_config, grace=0.5)
    try:
        said = health("--server", loading.target)
        assert said.exit_code == 1
        assert "NOT_SERVING" in str(said.exception)
    finally:
        loading.close()
    said = health("--server", loading.target)
    assert said.exit_code == 1
    assert "no server answers" in str(said.exception)


def test_health_is_asked_over_tls_with_settings_from_the_environment(
    tiny_config, tmp_path, monkeypatch
):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = TlsFiles(tmp_path / "server.pem", tmp_path / "server.pem")
    server = RunningServer(tiny_config, tls=files).load()
    try:
        monkeypatch.setenv("PREFIXCACHE_SERVER", server.target)
        assert health().exit_code == 1
        monkeypatch.setenv("PREFIXCACHE_CA", str(tmp_path / "ca.pem"))
        assert health().exit_code == 0
    finally:
        server.close()


# -------------------------------------------------------------------------------- least privilege


def test_an_advertised_name_in_etc_hosts_is_enough():
    assert advertised("localhost:50051")[0] == "localhost"


UNPRIVILEGED = (
    *("setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups", "--no-new-privs"),
    *("--inh-caps", "-all,+dac_read_search", "--ambient-caps", "+dac_read_search"),
)
"""Runs a command as a user that can read everything, and write only what is its own."""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a server as another user")
def test_a_user_who_can_write_to_cache_and_tmp_only_can_serve(checkpoint, tmp_path):
    """As in the container: no home, no name, and kernels compiled at the first start."""
    if subprocess.run([*UNPRIVILEGED, "true"], check=False).returncode != 0:
        pytest.skip("setpriv cannot change the user here")
    cache, scratch = tmp_path / "cache", tmp_path / "tmp"
    for folder in (cache, scratch):
        folder.mkdir()
        os.chown(folder, 10001, 10001)
    flags = ["--model", str(checkpoint), "--port", "0", "--num-gpu-blocks-override", "64"]
    own = {"HOME": "/nonexistent", "PREFIXCACHE_HOME": str(cache), "TMPDIR": str(scratch)}
    with Process(*flags, within=UNPRIVILEGED, **own) as process:
        assert health("--server", f"127.0.0.1:{process.ready()}").exit_code == 0
        process.popen.send_signal(signal.SIGTERM)
        assert process.end(20)[0] == 0
    assert list((cache / "kernels").glob("cpu-*.so"))
    assert list(scratch.iterdir()) == []
