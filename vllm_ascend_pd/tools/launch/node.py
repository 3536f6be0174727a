# SPDX-License-Identifier: Apache-2.0
"""What scripts/launch_prefill.sh and launch_decode.sh run: sets the environment of an engine's node, and becomes vLLM.

It does so by a shell script, which `--dry-run` prints.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil

from vllm_ascend_pd.core.hosts import normal_host
from vllm_ascend_pd.tools.launch.engine import DeviceType, EngineOptions, EngineSide, parse_options
from vllm_ascend_pd.tools.vllm_serve import PLUGIN, PLUGINS, CommandError, plugins_with_ours

_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
_WHAT_TO_SET = "set PYTHON to the Python, or VENV to the environment, in which vllm-ascend-pd is installed"

_HELP = {
    EngineSide.PREFILL: """Start one node of a prefill engine on Ascend NPUs, or on the CPU for tests.

For example, TP 16 on an A3 server:

\b
  scripts/launch_prefill.sh --device a3 --address 10.0.0.11 \\
    -- /models/DeepSeek-R1-W8A8 -tp 16 \\
    --enable-expert-parallel --quantization ascend --enforce-eager
""",
    EngineSide.DECODE: """Start one node of a decode engine on Ascend NPUs, or on the CPU for tests.

For example, DP 4 of TP 4 on an A3 server:

\b
  scripts/launch_decode.sh --device a3 --address 10.0.0.12 \\
    -- /models/DeepSeek-R1-W8A8 -tp 4 -dp 4 \\
    --enable-expert-parallel --quantization ascend
""",
}
_MORE_HELP = """

What follows -- goes to `vllm serve`. Its port is 8100 for prefill and 8200 for decode unless --port is given. Its
access log omits /health and /metrics unless --disable-access-log-for-endpoints is given. Exits with 2 and a reason if
options contradict each other.

Environment variables for vLLM and CANN are set unless you have set them. --dry-run shows each with its purpose. The
first NPUs are used unless ASCEND_RT_VISIBLE_DEVICES names others. If no interface has --address, set
GLOO_SOCKET_IFNAME.

PYTHON (default: $VENV/bin/python, else python3) is the Python with vLLM. VLLM is the command (default: the one beside
PYTHON). If CANN's environment is not loaded, loads it from ASCEND_TOOLKIT_ENV and ASCEND_ATB_ENV (default: set_env.sh
at the usual paths).
"""


class CannotStartError(RuntimeError):
    """The options are valid, but the engine cannot start here."""


class Variable(NamedTuple):
    """An environment variable that engines depend on. The user's own value wins."""

    name: str
    value: str
    why: str


def variables(options: EngineOptions, interface: str, devices: str) -> list[Variable]:
    """Returns every variable that is set for an engine, with its value and purpose. Others are handed on."""
    address = options.address or ""
    found = _cpu(address, interface) if options.device is DeviceType.CPU else _npu(options, address, interface, devices)
    if options.beside is not None:
        why = "a KV pool finds blocks by hash, which must be the same on all engines"
        found.append(Variable("PYTHONHASHSEED", "0", why))
    return [
        *found,
        Variable("VLLM_NO_USAGE_STATS", "1", "sends no usage statistics to the vLLM project"),
    ]


_LISTENS = "address of this node, on which the connector listens and which tickets name"


def _cpu(address: str, interface: str) -> list[Variable]:
    """vLLM's CPU backend, for tests on a machine without NPUs."""
    return [
        Variable("VLLM_HOST_IP", address, _LISTENS),
        Variable("VLLM_LOOPBACK_IP", address, "address for the processes of one engine"),
        Variable("GLOO_SOCKET_IFNAME", interface, "network interface of torch's gloo groups"),
        Variable(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind", "binds no threads to cores, because several engines share them"
        ),
        Variable("OMP_NUM_THREADS", "1", "CPU threads per rank"),
    ]


def _npu(options: EngineOptions, address: str, interface: str, devices: str) -> list[Variable]:
    """Values are those of vllm-ascend's guides to prefill/decode disaggregation (0.23) unless the purpose says
    otherwise."""
    buffer_mb = "256" if options.role is EngineSide.PREFILL else "600"
    return [
        Variable("VLLM_HOST_IP", address, _LISTENS),
        Variable("HCCL_IF_IP", address, "address at which HCCL's ranks find each other"),
        Variable("HCCL_SOCKET_IFNAME", interface, "network interface of HCCL_IF_IP"),
        Variable("GLOO_SOCKET_IFNAME", interface, "network interface of torch's gloo groups, for the CPU's exchanges"),
        Variable("TP_SOCKET_IFNAME", interface, "network interface of torch's TensorPipe"),
        Variable(_DEVICES, devices, "NPUs of this engine; engines of a node must not share NPUs"),
        Variable("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "reduces memory fragmentation"),
        Variable("HCCL_BUFFSIZE", buffer_mb, "MB of each HCCL communicator; expert-parallel decode needs more"),
        Variable(
            "HCCL_CONNECT_TIMEOUT",
            "1200",
            "seconds that ranks wait for each other; loading weights takes minutes (HCCL's default: 120)",
        ),
        Variable("TASK_QUEUE_ENABLE", "1", "torch_npu launches kernels from a second thread, which hides their cost"),
        Variable("OMP_NUM_THREADS", "10", "CPU threads per rank; ranks * threads should not exceed the cores"),
        Variable("OMP_PROC_BIND", "false", "binds no threads to cores, because all ranks would take the same ones"),
    ]


def script(options: EngineOptions, environment: Mapping[str, str], secrets: Mapping[str, str]) -> str:
    """Returns the shell script that starts the engine's node. It names secrets without their values.

    environment: of this process.
    secrets: variables of --env-file.

    Raises CommandError.
    """
    if (plugins := plugins_with_ours(environment)) is not None:
        raise CommandError(f"{PLUGINS} must name {PLUGIN}, too, or vLLM has no such connector: set it to {plugins}")
    most, needed = options.device.per_node, options.shape.per_node
    if most is not None and needed > most:
        server = f"{options.device.value.upper()} servers have {most}"
        raise CommandError(f"{needed} devices on a node, but {server}: use more nodes")
    words = options.serve_words()
    devices = _devices(options, needed, environment)
    own = {**environment, **secrets}
    lines = ["set -e", *(f"source {shlex.quote(file)}" for file in _cann_files(options, own))]
    for variable in variables(options, _interface(options, own), devices):
        origin = f" (set by you; else {variable.value})" if variable.name in own else ""
        lines.append(f"# {variable.name}: {variable.why}{origin}")
        lines.append(f"export {variable.name}={shlex.quote(own.get(variable.name, variable.value))}")
    lines += [f"# {name}: from {options.env_file}" for name in secrets]
    program = environment.get("VLLM") or _vllm_beside_python()
    return "\n".join([*lines, f"exec {shlex.join([program, *words])}"])


def _cann_files(options: EngineOptions, environment: Mapping[str, str]) -> list[str]:
    """Returns what loads CANN's environment, if it is not loaded."""
    if options.device is DeviceType.CPU or environment.get("ASCEND_HOME_PATH"):
        return []
    usual = {
        "ASCEND_TOOLKIT_ENV": "/usr/local/Ascend/ascend-toolkit/set_env.sh",
        "ASCEND_ATB_ENV": "/usr/local/Ascend/nnal/atb/set_env.sh",
    }
    return [environment.get(name) or path for name, path in usual.items()]


def _vllm_beside_python() -> str:
    """Returns vLLM's command of this Python's environment, or its name alone for the one in PATH."""
    own = Path(sys.executable).with_name("vllm")
    return str(own) if os.access(own, os.X_OK) else "vllm"


def _devices(options: EngineOptions, needed: int, environment: Mapping[str, str]) -> str:
    """Returns the NPUs of this node as a list for ASCEND_RT_VISIBLE_DEVICES."""
    most = options.device.per_node
    if most is None:
        return ""
    listed = environment.get(_DEVICES)
    if listed is None:
        return ",".join(map(str, range(needed)))
    if not re.fullmatch(r"(0|[1-9]\d{0,5})(,(0|[1-9]\d{0,5}))*", listed, re.ASCII):
        raise CommandError(f"{_DEVICES}={listed}: must be numbers, such as 0,1,2")
    numbers = [int(number) for number in listed.split(",")]
    for place, number in enumerate(numbers):
        if number >= most:
            server = f"{options.device.value.upper()} servers have NPUs 0 to {most - 1}"
            raise CommandError(f"{_DEVICES}={listed}: {server}, not {number}")
        if number in numbers[:place]:
            raise CommandError(f"{_DEVICES}={listed}: {number} is listed twice")
    if len(numbers) != needed:
        raise CommandError(f"{_DEVICES}={listed} lists {len(numbers)} NPUs, but the engine needs {needed} on this node")
    return listed


def _interface(options: EngineOptions, environment: Mapping[str, str]) -> str:
    address = normal_host(options.address or "")
    if found := environment.get("GLOO_SOCKET_IFNAME"):
        return found
    if options.device is DeviceType.CPU and address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(normal_host(each.address) == address for each in addresses):
            return str(name)
    raise CommandError(f"set GLOO_SOCKET_IFNAME: no interface with {address} was found")


def _read_env_file(file: Path) -> dict[str, str]:
    """Reads secrets, which only the file's owner may read: every user can read command lines and hosts.yaml."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStartError(f"--env-file {file}: {error}") from None
    if mode & 0o077:
        raise CannotStartError(f"--env-file {file} has mode {mode:o}, so other users can access it: chmod 600 it")
    found = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise CannotStartError(f"--env-file {file}: a line is not NAME=VALUE")
        found[name] = value
    return found


def _start(options: EngineOptions, text: str, environment: Mapping[str, str]) -> NoReturn:
    """Becomes the engine. Raises CannotStartError."""
    program = shlex.split(text.splitlines()[-1])[1]
    if shutil.which(program) is None:
        raise CannotStartError(f"{program} not found: {_WHAT_TO_SET}")
    for file in _cann_files(options, environment):
        if not os.access(file, os.R_OK):
            reason = f"{file} does not exist: `source` its set_env.sh first"
            raise CannotStartError(f"CANN's environment is not loaded, and {reason}")
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the engine would inherit that
    os.execvpe("bash", ["bash", "-c", text], environment)


def main(words: Sequence[str]) -> NoReturn:
    """`words`: the role, then the options of the launch script."""
    role = EngineSide(words[0])
    name = f"launch_{role}"
    try:
        options = parse_options(role, words[1:], f"{name}.sh", _HELP[role] + _MORE_HELP)
        if options is None:
            sys.exit()
        if options.device is DeviceType.CPU:
            options = replace(options, address=options.address or "127.0.0.1")
        if not options.address:
            raise CommandError("--address is missing: other nodes need it to reach this one")
        secrets = {} if options.env_file is None else _read_env_file(options.env_file)
        text = script(options, os.environ, secrets)
        if options.dry_run:
            print(text)
            sys.exit()
        _start(options, text, {**os.environ, **secrets})
    except (CommandError, CannotStartError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, CommandError) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
