# SPDX-License-Identifier: Apache-2.0
"""What `reservation.py` compares: ways to have a prompt computed, which give it decode's memory at different times."""

import bisect
import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.clusters import PATIENT_PROXY, Proxy
from harness.documented import documented
from harness.engines import HOST, PATIENT, Engine, EngineConfig, Role, Server, running_engines, wait_ready
from harness.ports import reserve_port
from harness.routers import vllm_router
from helpers.ttft_sides import ALL_TO_PREFILL, MODELS, PeerEngine, PullProxy, Side

SPEC = dataclasses.replace(MODELS["small"], name="small-32k", max_positions=32768)
BLOCK = 128
LONGEST, ANSWER = 16_000, 200
"""Tokens of the longest prompt, and of each answer."""
FIXED = 8_000
_PREFILL_BYTES = 512 << 20
"""131,072 tokens."""
_LONG_STOPS = ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "3600")
"""An engine that waits for its turn may be stopped within a step, for longer than vLLM's 300 s."""
SIDES = ("decode first", "long first", "prefill first", "mooncake")


class Way(Side):
    """As a `Side`. Knows what decode's memory was used for. `written`: where decode's `blocks_in_use.py` writes."""

    def __init__(self, name: str, front: Server, engines: Sequence[Engine], model: Path, written: Path) -> None:
        super().__init__(name, front.url, model, [server.process for server in (front, *engines)])
        self._written = written

    def block_seconds(self, begun: float, ended: float) -> tuple[float, float]:
        """Of decode's blocks between two monotonic times: those of requests that run, and those of all requests."""
        [file] = self._written.iterdir()
        lines = [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
        first = max(0, bisect.bisect([at for at, _, _ in lines], begun) - 1)
        sums = [0.0, 0.0]
        for number, (at, running, every) in enumerate(lines[first:], first):
            until = lines[number + 1][0] if number + 1 < len(lines) else ended
            seconds = max(0.0, min(until, ended) - max(at, begun))
            sums[0] += seconds * running
            sums[1] += seconds * every
        return sums[0], sums[1]


@contextmanager
def running_ways(names: Sequence[str], path: Path, logs: Path, room: int, step_tokens: int) -> Iterator[list[Way]]:
    """Those of `SIDES` that are named. All of ours share a prefill engine. `room`: for so many prompts of `FIXED`
    tokens decode has memory, with their answers. `step_tokens`: of prefill's steps."""
    with ExitStack() as stack:
        found: list[Way] = []
        if set(names) - {"mooncake"}:
            found += stack.enter_context(_ours(names, path, logs, room, step_tokens))
        if "mooncake" in names:
            found += stack.enter_context(_mooncake(path, logs, room, step_tokens))
        yield sorted(found, key=lambda way: names.index(way.name))


def blocks_of(room: int) -> int:
    """Returns decode's blocks."""
    return room * -(-(FIXED + ANSWER + 1) // BLOCK)


def _config(role: Role, blocks: Path, room: int, step_tokens: int) -> EngineConfig:
    """Without a prefix cache: all ways get the same prompts."""
    blocks.mkdir(parents=True, exist_ok=True)
    return EngineConfig(
        role=role,
        block_size=BLOCK,
        prefix_caching=False,
        max_model_len=LONGEST + ANSWER + BLOCK,
        max_num_batched_tokens=step_tokens,
        # vLLM keeps a block for itself.
        kv_cache_bytes=(blocks_of(room) + 1) * BLOCK * SPEC.kv_bytes_per_token
        if role is Role.DECODE
        else _PREFILL_BYTES,
        env=(_LONG_STOPS, *((("VLLM_ASCEND_PD_TEST_BLOCKS_IN_USE", str(blocks)),) if role is Role.DECODE else ())),
    )


@contextmanager
def _ours(names: Sequence[str], path: Path, logs: Path, room: int, step_tokens: int) -> Iterator[list[Way]]:
    """Behind `vllm-ascend-pd proxy`, and behind vllm-router, which asks prefill first. Prefill computes all prompts.
    *long first* has a decode engine of its own, with the default of `prefill_first_tokens`."""
    extra = (*PATIENT, ALL_TO_PREFILL)
    extras = {"plain": extra, "long first": (*extra, ("prefill_first_tokens", "auto"))}
    if "long first" not in names:
        del extras["long first"]
    elif not {"decode first", "prefill first"} & set(names):
        del extras["plain"]
    folders = {name: logs / f"blocks-{name.replace(' ', '-')}" for name in extras}
    configs = [dataclasses.replace(_config(Role.PREFILL, logs, room, step_tokens), connector_extra=PATIENT)]
    for name, extra in extras.items():
        config = _config(Role.DECODE, folders[name], room, step_tokens)
        configs.append(dataclasses.replace(config, connector_extra=extra))
    with running_engines(path, configs, logs) as [prefill, *engines], ExitStack() as stack:
        decodes = dict(zip(extras, engines, strict=True))
        ways = []
        for name in [name for name in names if name != "mooncake"]:
            which = "long first" if name == "long first" else "plain"
            decode = decodes[which]
            if name == "prefill first":
                parts = {
                    "http://127.0.0.1:8100": prefill.url,
                    "http://127.0.0.1:8200": decode.url,
                    " --port 8000": "",
                }
                words = documented("docs/routers.md", "vllm-router --vllm-pd-disaggregation --kv-connector nixl", parts)
                front: Server = stack.enter_context(vllm_router("vllm-router-nixl", words, logs))
            else:
                front = Proxy([prefill], [decode], logs, args=PATIENT_PROXY)
                stack.callback(front.stop)
                wait_ready([front])
            ways.append(Way(name, front, [prefill, decode], path, folders[which]))
            stack.callback(ways[-1].close)
        yield ways


@contextmanager
def _mooncake(path: Path, logs: Path, room: int, step_tokens: int) -> Iterator[list[Way]]:
    """vLLM's MooncakeConnector, as in `ttft_sides.py`."""
    port, blocks = reserve_port(), logs / "blocks-mooncake"
    transfer = {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
    env = (("VLLM_ASCEND_PD_TEST_ACCELERATOR_0", "1"), ("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(port)))
    configs = []
    for role in (Role.PREFILL, Role.DECODE):
        config = _config(role, blocks, room, step_tokens)
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        configs.append(PeerEngine(**fields | {"env": (*config.env, *env)}, transfer=tuple(transfer.items())))
    with running_engines(path, configs, logs) as engines, ExitStack() as stack:
        urls = [f"--{role}={engine.url}" for role, engine in zip(("prefill", "decode"), engines, strict=True)]
        proxy = PullProxy(logs, *urls, "--bootstrap", f"http://{HOST}:{port}")
        stack.callback(proxy.stop)
        wait_ready([proxy])
        way = Way("mooncake", proxy, engines, path, blocks)
        stack.callback(way.close)
        yield [way]


def now() -> float:
    """The clock of `Way.block_seconds`: the same in all processes."""
    return time.monotonic()
