# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/scale.py: decode engines without a model, many in one process. Each has a scheduler's connector, a
rank and its threads, and a listener."""

from collections import Counter
from typing import Any

from harness.waiting import wait_until
from helpers.scale_parts import TIMEOUT_S, TOKENS, Blocks, Configs, Memory, Meter, blocks_of


class DecodeEngine:
    def __init__(self, configs: Configs, engine_id: str, port: int) -> None:
        from vllm_ascend_pd.connector.metrics import HandshakeMetadata
        from vllm_ascend_pd.core.config import parse_config
        from vllm_ascend_pd.decode.worker import DecodeWorker
        from vllm_ascend_pd.device.cpu import CpuDevice

        self.meter = Meter("pd-grants", "metaserver-client")
        self._device = CpuDevice()
        with self.meter.owning():
            self._connector = configs.scheduler("kv_consumer", engine_id, port)
            self._worker = DecodeWorker(
                configs.rank_info(engine_id), parse_config({}), self._device, configs.engine(), configs.caches
            )
        handshake = HandshakeMetadata(*self._worker.handshake())
        self._connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self._requests: dict[str, tuple[Any, list[int]]] = {}

    def begin(self, names: list[str], first: int, url: str) -> None:
        """Requests arrive."""
        from harness.scheduling import make_request

        params = {"do_remote_prefill": True, "metaserver": url}
        self._requests = {
            name: (make_request(name, TOKENS, dict(params)), blocks_of(first + i)) for i, name in enumerate(names)
        }

    def issue(self) -> None:
        """Allocates the requests, all in one step."""
        timed, connector = self.meter.timed, self._connector
        for request, ids in self._requests.values():
            external, _ = timed("get_num_new_matched_tokens", connector.get_num_new_matched_tokens, request, 0)
            timed("update_state_after_alloc", connector.update_state_after_alloc, request, Blocks(ids), external)
        self.step()

    def step(self) -> set[str]:
        """In which other requests run; returns those whose KV has arrived."""
        from vllm.v1.outputs import KVConnectorOutput

        from harness.scheduling import make_output
        from vllm_ascend_pd.connector.metrics import ReportMetadata

        meter, worker = self.meter, self._worker
        output = make_output()
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"other": 1}, 1
        step = meter.timed("build_connector_meta", self._connector.build_connector_meta, output)
        step = meter.carried("down", step)
        meter.timed("rank", worker.start_step, step.step)
        arrivals = meter.timed("rank", worker.take_arrivals)
        report = meter.timed("rank", worker.take_report)
        metadata = meter.carried("up", None if report is None else ReportMetadata(report))
        if arrivals.failed or (report is not None and report.failed):
            raise RuntimeError(f"decode lost requests: {report}")
        news = KVConnectorOutput(finished_recving=arrivals.closed or None, kv_connector_worker_meta=metadata)
        meter.timed("update_connector_output", self._connector.update_connector_output, news)
        return set(arrivals.closed)

    def empty_steps(self, count: int) -> None:
        for _ in range(count):
            with self.meter.aside():
                self.step()

    def finish(self) -> None:
        """All KV arrives, and all requests end. Their posts have been answered."""
        wait_until(
            lambda: len(self._worker._arrivals._news.closed) == len(self._requests), TIMEOUT_S, "KV arrives at decode"
        )
        client = self._connector._role._recipients._metaserver
        wait_until(lambda: not client._posts, TIMEOUT_S, "posts are answered")
        arrived = self.step()
        if arrived != set(self._requests):
            raise RuntimeError(f"{len(arrived)} requests arrived at decode, not {len(self._requests)}")
        for request, ids in self._requests.values():
            finished = self._connector.request_finished_all_groups
            _, answer = self.meter.timed("request_finished_all_groups", finished, request, (ids,))
            if not answer.get("received_bytes"):
                raise RuntimeError(f"decode received nothing for {request.request_id}: {answer}")
        self._requests = {}

    def close(self) -> None:
        self._connector.shutdown()
        self._worker.close(TIMEOUT_S)
        self._device.close()


class DecodeEngines:
    """The program of the process of decode engines."""

    def __init__(self, model: str, layers: int, num_blocks: int, ports: list[int]) -> None:
        configs = Configs(model, layers, num_blocks)
        self._engines = [DecodeEngine(configs, f"decode-{i}", port) for i, port in enumerate(ports)]
        self._used: list[DecodeEngine] = []
        self._memory = Memory()

    def begin(self, wave: str, shares: list[int], url: str, memory: bool) -> None:
        """`shares`: how many requests each of the first engines gets."""
        self._used, first = self._engines[: len(shares)], 0
        for number, (engine, share) in enumerate(zip(self._used, shares, strict=True)):
            engine.begin([f"cmpl-{wave}-{number}-{i}-0-0a1b2c3d" for i in range(share)], first, url)
            first += share
            engine.meter.begin()
        if memory:
            self._memory.begin()

    def issue(self) -> None:
        for engine in self._used:
            engine.issue()

    def empty_steps(self, count: int) -> None:
        for engine in self._used:
            engine.empty_steps(count)

    def held(self) -> int:
        return self._memory.end()

    def finish(self) -> dict[str, Any]:
        """What the wave cost the engines in it, all together."""
        for engine in self._used:
            engine.finish()
        costs = [engine.meter.costs() for engine in self._used]
        return {
            "scheduler": sum(each["scheduler"] for each in costs),
            "rank": sum(each["rank"] for each in costs),
            **{name: dict(sum((Counter(each[name]) for each in costs), Counter())) for name in ("threads", "bytes")},
            "empty_step": max(each["empty_step"] for each in costs),
        }

    def stop(self, reusable: bool) -> list[str]:
        for engine in self._engines:
            engine.close()
        return []
