# SPDX-License-Identifier: Apache-2.0
"""What may not be handed on behind `--`, to `vllm serve` or to the proxy: what the launch scripts set themselves."""

from __future__ import annotations

import re
import sys

_OWN = {
    "--port": "--port",
    "--host": "--listen",
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--pipeline-parallel-size": "--pp",
    "-pp": "--pp",
    "--data-parallel-size": "--dp",
    "-dp": "--dp",
    "--data-parallel-size-local": "--nodes",
    "-dpl": "--nodes",
    "--data-parallel-address": "--head-address",
    "-dpa": "--head-address",
    "--data-parallel-rpc-port": "--head-port",
    "-dpp": "--head-port",
    "--data-parallel-start-rank": "--node-rank",
    "-dpr": "--node-rank",
    "--data-parallel-rank": "--node-rank",
    "-dpn": "--node-rank",
    "--headless": "--node-rank",
    "--nnodes": "--nodes",
    "-n": "--nodes",
    "--node-rank": "--node-rank",
    "-r": "--node-rank",
    "--master-addr": "--head-address",
    "--master-port": "--head-port",
    "--distributed-executor-backend": "--executor",
    "--kv-transfer-config": "this script's options",
    "--served-model-name": "--served-model-name",
    "--model": "--model",
}
"""Of `vllm serve`, and what to use instead."""
_SECRET = {
    "--api-key": "VLLM_API_KEY",
    "--hf-token": "HF_TOKEN",
    "--ssl-keyfile-password": "a key file without a password",
}
_UNCOUNTED = "is not counted in an engine's NPUs here: start one that has it with `vllm serve` itself"
_SCRIPTS = dict.fromkeys(("--dry-run", "--help", "-h"), "is the launch script's, before the --")
_OTHERS = {
    **_SCRIPTS,
    "--config": "names a file that could set what is set here: give its options themselves",
    "--prefill-context-parallel-size": _UNCOUNTED,
    "-pcp": _UNCOUNTED,
}
"""With the reason why not."""
NAMES = (*_SECRET, *_OWN, *_OTHERS)
_NOT_CUT = frozenset({"--ssl-keyfile", "--", "-"})
"""Words that would be taken for one of `NAMES` cut short, and are not."""


def refused_argument(argument: str) -> str | None:
    """Why an argument may not be handed on to `vllm serve`; None if it may.

    vLLM takes `_` for `-` in names, names that are cut short, `--NAME.KEY` for a key of a JSON object, and `-n2`.
    """
    if "\n" in argument or "\0" in argument:
        return f"{argument[:40]!r} has more than one line"
    name = _in_full(re.split(r"[=.]", argument)[0].replace("_", "-"))
    if name in _SECRET:
        return (
            f"{name}: every user of the machine can read command lines; put {_SECRET[name]} into a file of mode 0600 "
            "and name that with --env-file"
        )
    if name in _OWN:
        return f"{name} is set here: use {_OWN[name]}"
    if name in _OTHERS:
        return f"{name} {_OTHERS[name]}"
    return None


def _in_full(name: str) -> str:
    """The one of `NAMES` that a word may stand for, which may be cut short; another word as it is."""
    if name in NAMES or name in _NOT_CUT or not name.startswith("-"):
        return name
    if name[:2] in ("-n", "-r"):
        return name[:2]
    return next((each for each in NAMES if each.startswith(name)), name)


_PROXYS_OWN = {
    "--prefill": ("--prefill", "prefill"),
    "--decode": ("--decode", "decode"),
    "--host": ("--listen", "proxy.listen"),
    "--port": ("--port", "proxy.port"),
    "--metaserver-url": ("--address", "hosts"),
    "--ticket-secret-file": ("--ticket-secret", "ticket_secret"),
    "--metaserver-token-file": ("--metaserver-token", "metaserver_token"),
    "--tls-cert": ("--tls-cert", None),
    "--tls-key": ("--tls-key", None),
    "--tls-key-password-file": ("--tls-key-password", None),
    "--metaserver-port": ("--metaserver-port", None),
    "--metaserver-tls-cert": ("--metaserver-tls-cert", None),
    "--metaserver-tls-key": ("--metaserver-tls-key", None),
    "--metaserver-tls-key-password-file": ("--metaserver-tls-key-password", None),
    "--metaserver-client-ca": ("--metaserver-client-ca", None),
}
"""Of `vllm-ascend-pd proxy`: the option of launch_proxy.sh that makes it, and hosts.yaml's key for that, if any."""


def refused_proxy_argument(argument: str, *, hosts_file: bool = False) -> str | None:
    """Why an argument may not be handed on to `vllm-ascend-pd proxy`, which knows no short forms; None if it may."""
    name = argument.partition("=")[0]
    if name in _SCRIPTS:
        return f"{name} {_SCRIPTS[name]}"
    if name not in _PROXYS_OWN:
        return None
    option, key = _PROXYS_OWN[name]
    if not hosts_file:
        return f"{name} is set here: use {option} before the --"
    if key is None:
        return (
            f"{name}: not with hosts.yaml, whose engines are told http:// and proxy.port for their tickets; "
            "scripts/launch_proxy.sh has it"
        )
    return f"{name} is set here: use {key}"


if __name__ == "__main__":
    # For launch_proxy.sh: the first reason among the words behind its `--`, or nothing.
    print(next((reason for word in sys.argv[1:] if (reason := refused_proxy_argument(word)) is not None), ""))
