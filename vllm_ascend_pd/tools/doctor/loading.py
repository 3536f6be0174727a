# SPDX-License-Identifier: Apache-2.0
"""Checks that an engine's libraries can be loaded: torch, Mooncake, vLLM and the compiled ops."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ascend_pd.core.hosts import is_loopback
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.doctor import child
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning
from vllm_ascend_pd.tools.doctor.probe import ON_NPUS, PARTS, Loaded
from vllm_ascend_pd.tools.doctor.tools import Ran, run_tool
from vllm_ascend_pd.transport.mooncake_library import remedy

TIMEOUT_S = 240.0
"""Importing vLLM takes seconds, or more than a minute on a busy machine."""

_CHARS = 300

_ACTIONS = {
    "torch": "install torch again, in the version that requirements/ names for this machine",
    "torch_npu": "load CANN's environment (`source` its set_env.sh), and install a torch-npu that fits torch and CANN",
    "npus": "check that `npu-smi info` lists this machine's NPUs, and that this user may use them",
    "ops": "build the compiled ops against this torch: pip install --no-build-isolation -e . in vllm-ascend-pd",
    "kernels": "load CANN's environment (`source` its set_env.sh); if that does not help, build them against this CANN "
    "and torch_npu: pip install -v --no-build-isolation -e . in vllm-ascend-pd",
    "mooncake": "install the libraries it names (libibverbs1, librdmacm1; for the NPU wheel CANN's environment)",
    "connector": "install the vLLM, and on NPUs the vllm-ascend, that requirements/ names",
    "device": "install the vLLM, and on NPUs the vllm-ascend, that requirements/ names",
    "host": "set VLLM_HOST_IP to the address by which other hosts reach this one",
}

_WHAT = {
    "torch": "torch",
    "torch_npu": "torch_npu",
    "npus": "the list of NPUs",
    "ops": "compiled ops",
    "kernels": "the NPU's kernels",
    "mooncake": "Mooncake's engine",
    "connector": "LayerwisePushConnector in vLLM",
}


async def load_all() -> tuple[list[Loaded], Ran]:
    """Loads everything in a child process. Returns its reports and how it ended."""
    ran = await run_tool(child.command("probe"), TIMEOUT_S)
    return child.lines(ran.output, Loaded), ran


def judge(loaded: Sequence[Loaded], ran: Ran, on_npu: bool) -> list[Finding]:
    findings = [_part(part, on_npu) for part in loaded]
    if ran.problem is not None:
        reached = [part.part for part in loaded]
        at = next(
            (part for part in PARTS if part not in reached and (part not in ON_NPUS or on_npu)),
            "the end of the process",
        )
        last = one_line(ran.errors[-_CHARS:], _CHARS)
        reason = f"loading stopped at {at}: the process {ran.problem}" + (f" ({last})" if last else "")
        findings.append(error("loading.process", reason, _ACTIONS.get(at, "report this with its output")))
    return findings


def detail_of(loaded: Sequence[Loaded], part: str) -> str | None:
    """Returns the details of `part`, or None if it could not be loaded."""
    return next((each.detail for each in loaded if each.part == part and not each.error), None)


def npus_seen(loaded: Sequence[Loaded]) -> list[int] | None:
    """Returns the machine's numbers of the NPUs that a process started here sees, or None if unknown."""
    detail = detail_of(loaded, "npus")
    if detail is None:
        return None
    numbers = [number for number in detail.split(",") if number]
    return [int(number) for number in numbers] if all(number.isdecimal() for number in numbers) else None


def _part(part: Loaded, on_npu: bool) -> Finding:
    check = f"loading.{part.part}"
    if part.missing:
        return note(check, f"not tried, since {_WHAT[part.missing]} cannot be loaded")
    if part.error:
        what = _WHAT.get(part.part, f"vLLM's {part.part}")
        action = remedy(part.error) if part.part == "mooncake" else _ACTIONS[part.part]
        return error(check, f"{what} cannot be loaded: {one_line(part.error, _CHARS)}", action)
    if part.part == "device":
        return _device(check, part.detail, on_npu)
    if part.part == "host":
        return _host(check, part.detail)
    if part.part == "kernels" and not part.detail:
        slower = "the NPU's kernels were not built: torch's slower operators are used instead"
        action = "load CANN's environment, then pip install -v --no-build-isolation -e . in vllm-ascend-pd"
        return note(check, slower, action)
    return ok(check, f"{_WHAT[part.part]}: loaded in {part.seconds:.1f} s", seconds=round(part.seconds, 3))


def _device(check: str, device: str, on_npu: bool) -> Finding:
    wanted = "npu" if on_npu else "cpu"
    if device == wanted:
        return ok(check, f"vLLM runs on {device}", device=device)
    found = f"vLLM runs on {device or 'no device that it knows'}, not on {wanted}"
    return error(check, found, _ACTIONS["device"], device=device)


def _host(check: str, host: str) -> Finding:
    if host in ("0.0.0.0", "::"):
        return error(check, "vLLM does not know this host's address", _ACTIONS["host"], host=host)
    if is_loopback(host):
        local = f"engines listen on {host}: other hosts cannot reach them"
        return warning(check, local, f"if prefill and decode are on several hosts, {_ACTIONS['host']}", host=host)
    return ok(check, f"engines listen on {host}", host=host)
