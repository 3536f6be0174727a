# SPDX-License-Identifier: Apache-2.0
"""One run of a scenario. Importing this module puts the simulation into the product's modules of this process."""

import gc
import hashlib
import itertools
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from harness.models import inspect_here
from simulation import kernel as kernels
from simulation import network as networks
from simulation import stand_ins
from simulation.engine import TOKEN, Configurations, Engine, Rank
from simulation.http import Api, Session, post
from simulation.kernel import Livelock
from simulation.memory import prefix_hashes
from simulation.oracle import LogWatch, Oracle
from simulation.proxy import Proxy
from simulation.router import MetaserverClient, Router
from simulation.scenario import Scenario
from simulation.writes import Mooncake
from vllm_ascend_pd import register
from vllm_ascend_pd.connector import build
from vllm_ascend_pd.core import protocol
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.protocol import TransportInfo
from vllm_ascend_pd.core.signed_addresses import sign_metaserver
from vllm_ascend_pd.core.ticket_params import METASERVER_SIGNATURE
from vllm_ascend_pd.decode import metaserver_client
from vllm_ascend_pd.prefill import regroup
from vllm_ascend_pd.proxy.http.engine_client import EngineClient
from vllm_ascend_pd.proxy.routing.dispatch import Attempt
from vllm_ascend_pd.transport import engine as transfer_engine
from vllm_ascend_pd.transport import http_client, tcp, wakeup
from vllm_ascend_pd.transport.secret_files import cluster_secret

# Idle virtual time costs real time, because each loop ticks. So timeouts are short.
_TIMEOUTS: dict[str, Any] = {
    "lease_s": 3.0,
    "write_timeout_s": 1.0,
    "transfer_timeout_s": 10.0,
    "queue_timeout_s": 15.0,
    "collective_timeout_s": 5.0,
}
_CONFIG = ConnectorConfig(
    **_TIMEOUTS,
    settle_timeout_s=5.0,
    grant_timeout_s=4.0,
    control_timeout_s=1.0,
    hold_timeout_s=5.0,
)
# The longest time in which no request ends, although some wait: they are in a queue, are sent, and their blocks settle.
# A process may stand still meanwhile. A ticket may wait for 30 s for its prompt (`EARLY_S`).
_LONGEST_S = 100.0
_REST_WITHIN_S = 120.0
_LOOK_S = 1.0
_RUNS_BETWEEN_COLLECTIONS = 8
_START_WITHIN_S = 60.0


class World:
    """The engines, the network and the clients of one run. `run` returns when all requests have ended."""

    def __init__(self, scenario: Scenario, order: int = 0) -> None:
        """`order`: another one runs the same events in another order of threads."""
        faults = scenario.faults
        self.scenario = scenario
        verify: Any = "all" if scenario.shape.verify else "off"
        self.config = msgspec.structs.replace(_CONFIG, verify_kv=verify)
        self.configurations = _configurations
        self.kernel = kernels.begin(f"{scenario.seed}/{order}", faults.interrupts)
        self._network = networks.begin_network(faults.loss, faults.repetition, faults.delay)
        # By session.
        self.mooncakes: dict[str, Mooncake] = {}
        # As `TransferLimits.settle_s`, in seconds.
        self.settle_s = 0.0
        self.oracle = Oracle(self)
        self.router = Router(self, self.kernel)
        # None: a model stands in its place.
        self.proxy: Any = None
        # Tokens that pools have of each prompt that our proxy was asked for.
        self.pooled: dict[tuple[int, ...], int] = {}
        # Names of the engines that speak a newer protocol version, too.
        self.newer: set[str] = set()
        self.prefills: list[Engine] = []
        self.decodes: list[Engine] = []
        self._requests = len(scenario.requests)

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefills, *self.decodes]

    @property
    def may_fail(self) -> bool:
        """Whether something happens that explains why a request fails."""
        faults, shape = self.scenario.faults, self.scenario.shape
        goes_wrong = faults.loss or faults.write_fails or faults.load_fails or faults.other_prompt or faults.delay
        goes_wrong = goes_wrong or faults.late or faults.http
        goes_wrong = goes_wrong or shape.states or shape.windows  # a held prompt may have too few tokens, or too many
        slow = faults.slow * faults.slow_by > 5 or faults.two_prefills
        tight = min(shape.prefill_blocks, shape.decode_blocks) < 40
        return bool(goes_wrong or slow or tight or any(each.what != "request" for each in self.scenario.events))

    @property
    def loses_messages(self) -> bool:
        """Whether messages of the side channel are lost, or late."""
        faults = self.scenario.faults
        return bool(faults.loss or faults.delay or any(each.what in ("cut", "part") for each in self.scenario.events))

    def extra_config(self, prefills: bool) -> dict[str, Any]:
        """Returns an engine's `kv_connector_extra_config`."""
        shape = self.scenario.shape
        said = _TIMEOUTS | {"verify_kv": self.config.verify_kv}
        if shape.secret:
            said["secret_file"] = str(_secret_file)
        if prefills:
            return said | {"hold_timeout_s": _CONFIG.hold_timeout_s}
        return said | {
            "who_computes": "never" if shape.never else "prefill",
            "prefill_first_tokens": shape.prefill_first,
        }

    # The run.

    def run(self) -> "World":
        _worlds[:] = [self]
        watch = LogWatch(self.oracle.violated)
        _logger.handlers = [watch]
        try:
            self._run()
        except Livelock as error:
            self.oracle.violated(f"R4: {error}")
        finally:
            _logger.handlers = [logging.NullHandler()]
            self.kernel.close()
            if next(_runs) % _RUNS_BETWEEN_COLLECTIONS == 0:
                gc.collect()  # before another run begins, which nothing of this one may touch
        return self

    def _run(self) -> None:
        shape = self.scenario.shape
        self.decodes = [Engine(self, False, n) for n in range(shape.decodes)]
        self.prefills = [Engine(self, True, n) for n in range(shape.prefills)]
        if not self._until(_START_WITHIN_S, lambda: all(engine.is_up for engine in self.engines)):
            self.oracle.violated("R4: an engine does not start")
            return
        if shape.proxy:
            prefills, decodes = (list(map(_url, each)) for each in (self.prefills, self.decodes))
            self.proxy = Proxy(self, prefills, decodes, str(_secret_file) if shape.secret else None)
            if not self._until(_START_WITHIN_S, lambda: self.proxy.is_up):
                self.oracle.violated("R4: the proxy does not start")
                return
        self._look()
        for event in self.scenario.events:
            self.kernel.at(event.at, getattr(self, event.what), *event.args)
        last = max((event.at for event in self.scenario.events), default=0.0)
        self.router.ended_at = self.kernel.now + last
        self._until(math.inf, lambda: self._have_ended() or self._stand_still())
        if not self.kernel.halted:
            for client in self.router.clients.values():
                if client.outcome is None:
                    self.oracle.violated(f"R4: {client.name} waits, and no request has ended for {_LONGEST_S:g} s")
        if not self.kernel.halted:
            # Prompts that nobody waits for any more may be held one after the other.
            hold_s = (_CONFIG.hold_timeout_s or 0.0) * self._requests
            self._until(_REST_WITHIN_S + hold_s, self._is_quiet)
            self.oracle.at_rest()

    def _look(self) -> None:
        self.oracle.look()
        self.kernel.at(_LOOK_S, self._look)

    def _until(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Lets time pass until `done()`, or the first violation. Returns whether `done()` came within `seconds`."""
        return self.kernel.run(self.kernel.now + seconds, done)

    @property
    def violations(self) -> list[str]:
        crashes = [f"R4: thread {name} has ended: {trace}" for name, trace in self.kernel.crashes]
        return self.oracle.violations + crashes

    def _have_ended(self) -> bool:
        return self.router.ended == self._requests

    def _stand_still(self) -> bool:
        return self.kernel.now > self.router.ended_at + _LONGEST_S * (2 if self.proxy is not None else 1)

    def _is_quiet(self) -> bool:
        return (
            self.router.is_quiet
            and not self.oracle.kept_by_proxy()
            and all(engine.is_up and self.oracle.is_at_rest(engine) for engine in self.engines)
            and not any(process.stopped for engine in self.engines for process in engine.processes)
        )

    def digest(self) -> str:
        """Returns a digest of the whole history."""
        return hashlib.sha256(repr(self.kernel.history).encode()).hexdigest()[:16]

    # HTTP.

    def metaserver_signature(self, url: str) -> dict[str, str]:
        """Returns what a proxy adds to the URL if the cluster has a secret."""
        secret = cluster_secret(str(_secret_file)) if self.scenario.shape.secret else None
        return {} if secret is None else {METASERVER_SIGNATURE: sign_metaserver(secret, url)}

    def api_for(self, engine: Engine) -> Api | None:
        return Api(engine) if self.scenario.shape.proxy else None

    def api_of(self, url: str) -> Api | None:
        """Returns the API server at `url`; None if none listens there."""
        engine = next((engine for engine in self.engines if url.startswith(_url(engine))), None)
        return engine.api if engine is not None and engine.is_up and not engine.process.dead else None

    def to_another_prefill(self, engine: Engine, name: str, tokens: list[int], params: dict[str, Any]) -> None:
        """Sends a prefill request to a second engine, too."""
        others = [each for each in self.prefills if each is not engine and each.is_up and not each.process.dead]
        if others:
            request = others[0].request(f"{name}-again", tokens, params, 1)
            others[0].add(request, prefix_hashes([*tokens, TOKEN]))

    # What happens from outside, by the names that events have.

    def request(self, name: str, family: int, length: int, max_tokens: int, route: str, pooled: int = 0) -> None:
        """A client asks: see `Router.ask`."""
        self.router.ask(name, family, length, max_tokens, route, pooled)

    def leave(self, name: str) -> None:
        """A client leaves."""
        self.router.leave(name)

    def stop(self, share: float, seconds: float) -> None:
        """A process stands still for a while."""
        ranks: list[tuple[kernels.Process, Rank | None]] = []
        for engine in self.engines:
            ranks += [(engine.process, None), *((rank.process, rank) for rank in engine.ranks)]
        ranks += [(engine.api.process, None) for engine in self.engines if engine.api is not None]
        process, rank = ranks[int(share * len(ranks))]
        if process.stopped or process.dead or process in self._network.broken:
            return
        self.kernel.tell("{} stands still for {} s", process.name, seconds)
        self.kernel.stop(process)
        self.kernel.at(seconds, self._go_on, process, rank)

    def _go_on(self, process: kernels.Process, rank: Rank | None) -> None:
        if process.dead or not process.stopped:
            return
        self.kernel.tell("{} goes on", process.name)
        self.kernel.go_on(process)
        if rank is not None:
            waiting, rank.when_it_goes_on = rank.when_it_goes_on, []
            for action in waiting:
                action()

    def reset(self, share: float) -> None:
        """The prefix cache of an engine is reset, which preempts its running requests."""
        engine = self.engines[int(share * len(self.engines))]
        self.kernel.tell("the prefix cache of {} is reset", engine.name)
        engine.reset()

    def weights(self, gap_s: float) -> None:
        """All engines get other weights, one after the other."""
        for number, engine in enumerate(self.engines):
            self.kernel.at(number * gap_s, engine.update_weights)

    def sleep(self, share: float, seconds: float) -> None:
        """An engine sleeps for a while."""
        engine = self.engines[int(share * len(self.engines))]
        if engine.is_up and not engine.process.dead:
            engine.sleep(seconds)

    def jump(self, share: float, seconds: float) -> None:
        """The wall clock of a process is set."""
        processes = [process for engine in self.engines for process in engine.processes]
        process = processes[int(share * len(processes))]
        self.kernel.tell("the clock of {} is set by {} s", process.name, seconds)
        process.wall_offset_s += seconds

    def upgrade(self, share: float, seconds: float) -> None:
        """An engine is killed, and starts again with a newer protocol version."""
        self.newer.add(self.engines[int(share * len(self.engines))].name)
        self.kill(share, seconds)

    def lose_step(self, share: float, *failing: Any) -> None:
        """An engine's next step fails. `failing`: how on each rank, and how long the engine then stands still."""
        engine = self.engines[int(share * len(self.engines))]
        if engine.is_up and not engine.process.dead:
            engine.lose_step(failing[:-1], failing[-1])

    def cut(self, share: float) -> None:
        """A connection of the side channel breaks."""
        self._network.break_connection(share)

    def part(self, prefill: float, decode: float, seconds: float) -> None:
        """Nothing passes between a prefill and a decode engine for a while."""
        one, other = self.prefills[int(prefill * len(self.prefills))], self.decodes[int(decode * len(self.decodes))]
        self.kernel.tell("nothing passes between {} and {} for {} s", one.name, other.name, seconds)
        self._network.cut_off(one.name, other.name, seconds)

    def kill(self, share: float, seconds: float) -> None:
        """All processes of an engine are killed. It starts again after a while, at the same address."""
        self.restart(self.engines[int(share * len(self.engines))], seconds)

    def restart(self, engine: Engine, seconds: float) -> None:
        if not engine.is_up or engine.process.dead:
            return
        self.kernel.tell("{} is killed", engine.name)
        for process in engine.processes:
            self.kernel.kill(process)
        self.router.died(engine)
        self.kernel.at(seconds, self._start_again, engine)

    def _start_again(self, dead: Engine) -> None:
        engines = self.prefills if dead.prefills else self.decodes
        engines[engines.index(dead)] = Engine(self, dead.prefills, dead.number)


_worlds: list[World] = []


def _world() -> World:
    return _worlds[0]


class _MetaserverClient:
    """A metaserver client's constructor, as `connector/build.py` calls it."""

    def __new__(cls, *arguments: Any) -> Any:
        if _world().scenario.shape.proxy:
            return metaserver_client.MetaserverClient(*arguments)
        return MetaserverClient(_world().router)


async def _post(self: Any, url: Any, headers: Any, content: bytes, max_bytes: int) -> tuple[int, bytes]:
    return await post(_world(), url.path, dict(headers), content)


def _url(engine: Engine) -> str:
    return f"http://10.0.{1 if engine.prefills else 2}.{engine.number + 1}:8000"


def _start_mooncake(host: str, protocol: str) -> Mooncake:
    process = kernels.kernel().this_process
    [rank] = [rank for engine in _world().engines for rank in engine.ranks if rank.process is process]
    return Mooncake(_world(), rank, host)


def _ranks_of_prefill() -> int:
    shape = _world().scenario.shape
    return shape.prefill_tp * shape.prefill_pp


class _Encoder:
    """Encodes frames of engines that speak a newer protocol version beside today's, too."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Any) -> bytes:
        if isinstance(message, protocol._Frame) and kernels.kernel().this_process.engine in _world().newer:
            message = msgspec.structs.replace(message, newest=message.newest + 1)
        return self._encoder.encode(message)


def _install() -> None:
    """Puts the simulation under the product, in this process."""
    torch.set_num_threads(1)
    register()
    assert tcp  # imported late otherwise, with the real clock
    stand_ins.install(networks.zmq)
    wakeup._datagrams = networks.Datagrams  # type: ignore[assignment]
    build.MetaserverClient = _MetaserverClient  # type: ignore[misc, assignment]
    metaserver_client.tls_context = lambda tls: None  # type: ignore[assignment]
    http_client.Connections.post = _post  # type: ignore[method-assign]
    EngineClient._session = lambda self: Session(_world())  # type: ignore[method-assign, assignment, return-value]
    stand_ins.number(Attempt)
    transfer_engine._start = _start_mooncake
    transfer_engine.describe_transport = lambda protocol: TransportInfo(protocol, "simulated 1")
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm_ascend_pd.") and hasattr(module, "own_networks"):
            with suppress(TypeError):
                module.own_networks = lambda: ("10.0.0.0/8",)  # type: ignore[attr-defined]
    torch.distributed.get_world_size = lambda *_: _ranks_of_prefill()  # type: ignore[assignment]
    protocol._encoder = _Encoder()  # type: ignore[assignment]
    run = regroup.Regrouper.run

    def tells_purpose(self: Any, push: Any, tensors: Any) -> None:
        step_send = push.step_send
        self._device.purpose = (push.layer, len(step_send.unit_offsets), tuple(step_send.ticket_ids))
        run(self, push, tensors)

    regroup.Regrouper.run = tells_purpose  # type: ignore[method-assign]
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    _logger.propagate = False
    _logger.setLevel(logging.WARNING)


_logger = logging.getLogger("vllm_ascend_pd")
_folder = tempfile.TemporaryDirectory(prefix="simulation-")
os.environ["XDG_CONFIG_HOME"] = _folder.name  # engines do not use a secret that this user has
_secret_file = Path(_folder.name) / "secret"
_secret_file.touch(mode=0o600)
_secret_file.write_text("a-secret-of-this-simulation-alone-5f1c0b7e96d24a38\n")
inspect_here()
_configurations = Configurations(Path(_folder.name))
_install()
_runs = itertools.count()
gc.collect()
gc.freeze()  # what is loaded by now is not looked at again
gc.disable()  # threads of an earlier run would end in the middle of another one
