# SPDX-License-Identifier: Apache-2.0
"""Arguments that may not follow `--`: the launch scripts set them for `vllm serve`."""

from __future__ import annotations

import re

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
"""Options of `vllm serve`, and what to use instead."""
_SECRET = {
    "--api-key": "VLLM_API_KEY",
    "--hf-token": "HF_TOKEN",
    "--ssl-keyfile-password": "a key file without a password",
}
_UNCOUNTED = "is not supported here: start such an engine with `vllm serve` itself"
_SCRIPTS = dict.fromkeys(("--dry-run", "--help", "-h"), "is an option of the launch script: put it before the --")
_OTHERS = {
    **_SCRIPTS,
    "--config": "names a file that could contradict this script: give its options here",
    "--prefill-context-parallel-size": _UNCOUNTED,
    "-pcp": _UNCOUNTED,
}
"""Other options, and why they are refused."""
NAMES = (*_SECRET, *_OWN, *_OTHERS)
_NOT_CUT = frozenset({"--ssl-keyfile", "--", "-"})
"""Words that look like abbreviations of `NAMES`, but are not."""


def refused_argument(argument: str) -> str | None:
    """Returns why an argument may not be passed to `vllm serve`, or None if it may.

    vLLM accepts `_` for `-`, abbreviated names, `--NAME.KEY` for a key of a JSON object, and `-n2`.
    """
    if "\n" in argument or "\0" in argument:
        return f"{argument[:40]!r} has more than one line"
    name = _in_full(re.split(r"[=.]", argument)[0].replace("_", "-"))
    if name in _SECRET:
        return (
            f"{name}: every user of the machine can read command lines; put {_SECRET[name]} into a file of mode 0600 "
            "and name the file with --env-file"
        )
    if name in _OWN:
        return f"{name} is set here: use {_OWN[name]}"
    if name in _OTHERS:
        return f"{name} {_OTHERS[name]}"
    return None


def _in_full(name: str) -> str:
    """Returns the name in `NAMES` that `name` abbreviates, or `name` itself."""
    if name in NAMES or name in _NOT_CUT or not name.startswith("-"):
        return name
    if name[:2] in ("-n", "-r"):
        return name[:2]
    return next((each for each in NAMES if each.startswith(name)), name)
