"""The systemd unit, the image and the Kubernetes example of deploy/ start the server with options that it has."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from slipstream.serve.cli import read_config
from slipstream.serve.fleet.options import DeployConfig
from slipstream.tests.sources import ROOT
from slipstream.tests.test_packaging import PROJECT

UNIT = (ROOT / "deploy" / "slipstream.service").read_text()
IMAGE = (ROOT / "deploy" / "Dockerfile").read_text()


def unit_command() -> list[str]:
    """The command that systemd executes."""
    return shlex.split(next(line for line in UNIT.splitlines() if line.startswith("ExecStart="))[len("ExecStart=") :])


def image_command() -> list[str]:
    """The container's entry point."""
    line = next(line for line in IMAGE.splitlines() if line.startswith("ENTRYPOINT"))
    return json.loads(line.removeprefix("ENTRYPOINT"))


@pytest.mark.parametrize("command", [unit_command(), image_command()], ids=["unit", "image"])
def test_commands_have_options_that_exist(command, tmp_path):
    assert Path(command[0]).name in PROJECT["project"]["scripts"]
    (tmp_path / "serve.yaml").write_text("target: x\n")
    options = [word.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)) for word in command[1:]]
    assert read_config(options).log_format == "json"


def test_the_unit_hands_over_every_file_that_it_names():
    """The server's user cannot read /etc/slipstream, which is root's alone."""
    names = {word.removeprefix("${CREDENTIALS_DIRECTORY}/") for word in unit_command() if "/" in word} - {
        unit_command()[0]
    }
    handed = dict(re.findall(r"^LoadCredential=([^:]+):/etc/slipstream/(.+)$", UNIT, re.MULTILINE))
    assert names == {*handed}
    assert all(name == file for name, file in handed.items())


def test_the_unit_waits_longer_than_the_server_drains():
    wait = re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(wait[1]) >= read_config([]).drain_timeout + 15


def test_the_image_installs_the_same_torch_as_the_package():
    [torch] = [requirement for requirement in PROJECT["project"]["dependencies"] if requirement.startswith("torch>")]
    assert f'"{torch}"' in IMAGE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_understands_the_unit(tmp_path):
    (tmp_path / "slipstream.service").write_text(UNIT.replace(unit_command()[0], shutil.which("true") or ""))
    command = ["systemd-analyze", "verify", tmp_path / "slipstream.service"]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")


TEXT = {"type": "string", "minLength": 1}
# What KubeRay's schema (ray.io/v1) and Kubernetes' say of the fields that the example has.
POD = {
    "type": "object",
    "required": ["containers"],
    "additionalProperties": False,
    "properties": {
        "terminationGracePeriodSeconds": {"type": "integer"},
        "containers": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "image", "resources"],
                "additionalProperties": False,
                "properties": {
                    "name": TEXT,
                    "image": TEXT,
                    "env": {"type": "array", "items": {"required": ["name", "value"], "additionalProperties": TEXT}},
                    "ports": {"type": "array", "items": {"required": ["containerPort"]}},
                    "resources": {"type": "object", "required": ["requests", "limits"]},
                    "volumeMounts": {"type": "array", "items": {"required": ["name", "mountPath"]}},
                },
            },
        },
        "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    },
}
GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": TEXT},
    "template": {"type": "object", "required": ["spec"], "properties": {"spec": POD}, "additionalProperties": False},
}
COUNT = {"type": "integer", "minimum": 0}
WORKERS = {"groupName": TEXT, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT, **GROUP}
SERVICE = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["serveConfigV2", "rayClusterConfig"],
            "additionalProperties": False,
            "properties": {
                "serveConfigV2": TEXT,
                "rayClusterConfig": {
                    "type": "object",
                    "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
                    "additionalProperties": False,
                    "properties": {
                        "rayVersion": TEXT,
                        "enableInTreeAutoscaling": {"type": "boolean"},
                        "headGroupSpec": {"required": ["template"], "additionalProperties": False, "properties": GROUP},
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": {"required": [*WORKERS], "additionalProperties": False, "properties": WORKERS},
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture(scope="module")
def service() -> Any:
    return yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())


@pytest.fixture(scope="module")
def applications(service) -> Any:
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def test_kubernetes_understands_the_service(service):
    jsonschema.validate(service, SERVICE, jsonschema.Draft202012Validator)


def test_the_service_has_options_and_a_program_that_exist(applications):
    [application] = applications["applications"]
    module, function = application["import_path"].removeprefix("slipstream.").split(":")
    assert f"def {function}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    config = DeployConfig.read(application["args"])
    assert (config.host, config.port) == (applications["http_options"]["host"], applications["http_options"]["port"])


def test_the_service_has_the_release_room_and_files_that_its_application_needs(service, applications):
    cluster = service["spec"]["rayClusterConfig"]
    [requirement] = PROJECT["project"]["optional-dependencies"]["ray"]
    assert requirement.startswith(f"ray[serve]>={cluster['rayVersion'].rpartition('.')[0]},")
    config = DeployConfig.read(applications["applications"][0]["args"])
    [workers] = cluster["workerGroupSpecs"]
    assert workers["maxReplicas"] >= 2 * config.most_replicas
    pod = workers["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(config.tp)
    assert pod["terminationGracePeriodSeconds"] >= config.drain_timeout + 15
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert Path(str(config.api_key_file)).parent in {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in container["env"]


def test_ray_understands_the_application(applications):
    schema = pytest.importorskip("ray.serve.schema", reason="needs Ray: pip install -e '.[ray]'")
    schema.ServeDeploySchema(**applications)
