# SPDX-License-Identifier: Apache-2.0
"""The examples' commands are ones that the launch scripts, vLLM and the connector understand. The manifests are what
Kubernetes' schemas and the LeaderWorkerSet's say."""

import itertools
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from harness.serve_options import serve_parser
from vllm_ascend_pd import __version__, cli
from vllm_ascend_pd.core.config import ConnectorConfig, parse_config
from vllm_ascend_pd.proxy.settings import ProxySettings

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
KUSTOMIZATION = EXAMPLES / "kubernetes" / "kustomization.yaml"
MANIFESTS = sorted({*(EXAMPLES / "kubernetes").glob("*.yaml")} - {KUSTOMIZATION})
KUBERNETES = "1.37.0"

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "ASCEND_HOME_PATH": "/cann",  # its environment counts as loaded
    "GLOO_SOCKET_IFNAME": "eth0",  # this machine has no interface with the examples' addresses
}


def dry_run(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Returns what a launch script would run."""
    words = [command[0], "--dry-run", *command[1:]]
    done = subprocess.run(words, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, shlex.join(words) + done.stderr
    return words_of(done.stdout.splitlines()[-1].removeprefix("exec "))


def words_of(line: str) -> list[str]:
    """Splits a line as bash does, which quotes some words in ways that `shlex` does not know."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.split("\0")[:-1]


@cache
def vllm_parser() -> Any:
    """Of `vllm serve`."""
    return serve_parser()


def proxy_options(command: Sequence[str]) -> dict[str, Any]:
    """What the proxy takes from its command line."""
    words = list(command[command.index("proxy") + 1 :])
    return get_command(cli.app).commands["proxy"].make_context("proxy", words).params


def connector_config(transfer: Any) -> ConnectorConfig:
    """Returns our connector's configuration, by itself or below a MultiConnector."""
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == "MultiConnector":
        [ours] = [one for one in extra["connectors"] if one["kv_connector"] == "LayerwisePushConnector"]
        return parse_config(ours.get("kv_connector_extra_config", {}))
    assert transfer.kv_connector == "LayerwisePushConnector"
    return parse_config(extra)


def understood(words: list[str], role: str) -> ConnectorConfig:
    """Checks that vLLM accepts the command, and the connector its configuration, which is returned."""
    assert words[1] == "serve"
    arguments = vllm_parser().parse_args(words[2:])
    assert arguments.kv_transfer_config.kv_role == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    config = connector_config(arguments.kv_transfer_config)
    if role == "decode" and arguments.quantization == "ascend":
        step_tokens = arguments.max_num_batched_tokens
        assert step_tokens is None or step_tokens > 1024, "vllm-ascend would drop weights (unsupported_weights)"
    return config


# From the LeaderWorkerSet API v1 (kubernetes-sigs/lws, config/crd/bases); pod templates are checked as pods.
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["subdomainPolicy"],
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
                "rolloutStrategy": {"type": "object", "required": ["type"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": {"type": "object", "required": ["spec"]},
                        "workerTemplate": {"type": "object", "required": ["spec"]},
                        "subGroupPolicy": {"type": "object"},
                    },
                },
            },
        },
    },
}

# From the Prometheus operator's API v1.
POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
            "properties": {
                "selector": {"type": "object", "required": ["matchLabels"]},
                "podMetricsEndpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {"type": "string"},
                            "relabelings": {"type": "array"},
                        },
                    },
                },
            },
        },
    },
}


def resources(path: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all(path.read_text())


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    for resource in resources(path):
        if resource["kind"] == "PodMonitor":
            jsonschema.validate(resource, POD_MONITOR)
            continue
        if resource["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
            continue
        jsonschema.validate(resource, LEADER_WORKER_SET)
        for template in pod_templates(resource).values():
            kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, KUBERNETES, strict=True)


def pod_templates(resource: dict[str, Any]) -> dict[str, dict[str, Any]]:
    template = resource["spec"]["leaderWorkerTemplate"]
    return {"0": template["leaderTemplate"], "1": template["workerTemplate"]}


def expanded(command: list[str], values: dict[str, str]) -> list[str]:
    """A container's command with `$(NAME)` replaced, and this repository for the image's."""
    words = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in command]
    return [word.replace("/opt/vllm-ascend-pd", str(REPOSITORY)) for word in words]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_run_commands_that_are_understood(role: str) -> None:
    [resource] = resources(EXAMPLES / f"kubernetes/{role}.yaml")
    size = resource["spec"]["leaderWorkerTemplate"]["size"]
    for index, template in pod_templates(resource).items():
        [container] = template["spec"]["containers"]
        # What Kubernetes and the LeaderWorkerSet's controller put there.
        values = {"VLLM_HOST_IP": f"10.0.0.{index}", "LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": index}
        values["LWS_LEADER_ADDRESS"] = f"{role}-0.{role}.pd"
        assert {each["name"] for each in container["env"]} >= {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"}
        command = dry_run(expanded(container["command"], values), values)
        assert understood(command, role).secret_file == "/etc/pd/secret"
        assert ("--headless" in command) == (index == "1")
        if index == "0":
            port = command[command.index("--port") + 1]
            assert {"name": "http", "containerPort": int(port)} in container["ports"]
            assert all(container[probe]["httpGet"] == {"path": "/health", "port": "http"} for probe in PROBES)


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def test_pods_find_each_other() -> None:
    kinds = {(one["kind"], one["metadata"]["name"]): one for path in MANIFESTS for one in resources(path)}
    proxy = kinds["Deployment", "proxy"]
    [container] = proxy["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["vllm-ascend-pd", "proxy"]
    options = proxy_options(container["command"])
    # The leaders' names, at the ports that the engines serve at.
    for role, port in (("prefill", 8100), ("decode", 8200)):
        assert options[role] == [f"http://{role}-0.{role}:{port}"]
        service = kinds["Service", f"{role}-engines"]["spec"]
        leader = pod_templates(kinds["LeaderWorkerSet", role])["0"]
        assert service["clusterIP"] == "None"
        assert service["selector"].items() <= leader["metadata"]["labels"].items()
        assert service["ports"][0]["port"] == port
    # Decode posts tickets to the proxy's Service, whose URL the proxy signs.
    url = ProxySettings(
        prefill=["http://p:1"], decode=["http://d:1"], metaserver_url=options["metaserver_url"]
    ).metaserver_url
    assert url == "http://proxy:8000/v1/metaserver"
    assert kinds["Service", "proxy"]["spec"]["selector"] == proxy["spec"]["selector"]["matchLabels"]
    # All pods have one secret, as a file that nobody else may read: engines and proxy refuse others.
    assert options["secret_file"] == "/etc/pd/secret"
    engines = [pod_templates(kinds["LeaderWorkerSet", role]).values() for role in ("prefill", "decode")]
    templates = [proxy["spec"]["template"], *itertools.chain(*engines)]
    for pod in (template["spec"] for template in templates):
        [(name, secret)] = [(volume["name"], volume["secret"]) for volume in pod["volumes"] if "secret" in volume]
        assert secret == {"secretName": "pd-secret", "defaultMode": 0o400}
        [container] = pod["containers"]
        assert {"name": name, "mountPath": "/etc/pd", "readOnly": True} in container["volumeMounts"]
    assert len(templates) == 5


def test_the_kustomization_has_all_but_monitoring() -> None:
    [kustomization] = resources(KUSTOMIZATION)
    assert {*kustomization["resources"], "monitoring.yaml"} == {path.name for path in MANIFESTS}
    [secret] = kustomization["secretGenerator"]
    assert (secret["name"], secret["options"]) == ("pd-secret", {"disableNameSuffixHash": True})
    [image] = kustomization["images"]
    for path in MANIFESTS:
        for named in re.findall(r"image: (\S+)", path.read_text()):
            assert named == f"{image['name']}:{image['newTag']}" == f"{image['name']}:{__version__}"


def test_pods_are_monitored_under_the_jobs_of_the_alerts() -> None:
    """And each role may lose one pod at a time."""
    found = [one for path in MANIFESTS for one in resources(path) if "spec" in one]
    kinds = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in found}
    labels = {"proxy": kinds["Deployment", "proxy"]["template"]["metadata"]["labels"]}
    for role in ("prefill", "decode"):
        labels[role] = kinds["LeaderWorkerSet", role]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
        budget = kinds["PodDisruptionBudget", role]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"]["matchLabels"].items() <= labels[role].items()
    targets = yaml.safe_load((EXAMPLES / "observability" / "targets.yml").read_text())
    assert {group["labels"]["job"] for group in targets} == {f"pd-{name}" for name in labels}
    for name, of in labels.items():
        monitor = kinds["PodMonitor", name]
        assert monitor["selector"]["matchLabels"].items() <= of.items()
        [endpoint] = monitor["podMetricsEndpoints"]
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": f"pd-{name}"}]


def test_the_pools_files_are_json() -> None:
    for path in (EXAMPLES / "kv-pool").glob("*.json"):
        assert isinstance(json.loads(path.read_text()), dict)
