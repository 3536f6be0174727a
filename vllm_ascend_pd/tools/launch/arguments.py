# SPDX-License-Identifier: Apache-2.0
"""Arguments that may not follow `--`: the launch scripts set them for `vllm serve`."""

from __future__ import annotations

from vllm_ascend_pd.tools.vllm_serve import REPLACES_CONNECTOR, table

_OWN = {
    "port": "--port",
    "host": "--listen",
    "tensor-parallel-size": "--tp",
    "pipeline-parallel-size": "--pp",
    "data-parallel-size": "--dp",
    "data-parallel-size-local": "--nodes",
    "data-parallel-address": "--head-address",
    "data-parallel-rpc-port": "--head-port",
    "data-parallel-start-rank": "--node-rank",
    "data-parallel-rank": "--node-rank",
    "headless": "--node-rank",
    "nnodes": "--nodes",
    "node-rank": "--node-rank",
    "master-addr": "--head-address",
    "master-port": "--head-port",
    "distributed-executor-backend": "--executor",
    "kv-transfer-config": "this script's options",
    "served-model-name": "--served-model-name",
    "model": "--model",
}
"""Options of `vllm serve`, and what to use instead."""
_SECRET = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
_SCRIPTS = dict.fromkeys(("--dry-run", "--help", "-h"), "is an option of the launch script: put it before the --")
_OTHERS = {
    "help": _SCRIPTS["--help"],
    "config": "names a file that could contradict this script: give its options here",
    "prefill-context-parallel-size": "is not supported here: start such an engine with `vllm serve` itself",
    REPLACES_CONNECTOR: "makes vLLM replace this connector: give OffloadingConnector's entry with --beside, for a "
    "MultiConnector of both",
}
"""Other options, and why they are refused."""
REFUSED = frozenset({*_OWN, *_SECRET, *_OTHERS})


def refused_argument(argument: str) -> str | None:
    """Returns why an argument may not be passed to `vllm serve`, or None if it may.

    A short form of several options is refused if one of them is: another vLLM may have only that one.
    """
    if "\n" in argument or "\0" in argument:
        return f"{argument[:40]!r} has more than one line"
    if argument in _SCRIPTS:
        return f"{argument} {_SCRIPTS[argument]}"
    word = table().read(argument)
    options = () if word is None else word.perhaps if word.option is None else (word.option,)
    name = next((option.name for option in options if option.name in REFUSED), None)
    if name is None:
        return None
    if name in _SECRET:
        return (
            f"--{name}: every user of the machine can read command lines; put {_SECRET[name]} into a file of mode 0600 "
            "and name the file with --env-file"
        )
    if name in _OWN:
        return f"--{name} is set here: use {_OWN[name]}"
    return f"--{name} {_OTHERS[name]}"
