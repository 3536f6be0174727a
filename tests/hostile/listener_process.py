# SPDX-License-Identifier: Apache-2.0
"""A listener in a process of its own: its memory, files and threads are its alone. Imports little, so starts fast."""

import ctypes
import resource
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil
from examples import LARGE

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.protocol import GrantRefused
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.decode.listener import DescriptionListener
from vllm_ascend_pd.prefill.ticket_listener import TicketListener
from vllm_ascend_pd.transport.side_channel import SideChannelServer

HOST = "127.0.0.1"
ENGINE = "prefill-0"
"""The engine that takes tickets."""
PEERS = HostList((HOST,), "is not this test's")
"""Where its peers are. Attackers elsewhere on this host are strangers."""
SECRET = Secret([b"of the listener `keyed`, and its peers"])
FILES = 4000
"""Files that it may open."""


@dataclass(frozen=True)
class State:
    rss: int
    """What it holds: memory that was freed, and that malloc keeps for later, is given back first."""
    files: int
    threads: frozenset[str]
    rejected: int
    refused: int
    dropped: int


def serve(pipe: Connection, kind: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, FILES), hard))
    if kind == "ranks":
        server = SideChannelServer(
            HOST, 0, lambda message, peer: GrantRefused(getattr(message, "engine_id", ""), retry=False), hosts=PEERS
        )
        endpoint, close = server.endpoint, server.close
    elif kind == "keyed":  # its answers name the identity that libzmq has given the connection
        server = SideChannelServer(
            HOST, 0, lambda message, peer: GrantRefused(peer._identity.hex(), retry=False), secret=SECRET, hosts=PEERS
        )
        endpoint, close = server.endpoint, server.close
    elif kind == "tickets":
        tickets = TicketListener(ENGINE, HOST, 0, hosts=PEERS)
        endpoint, close, server = tickets.endpoint, lambda: tickets.close(5.0), tickets._server
    else:
        server = DescriptionListener(LARGE, HOST, 0, hosts=PEERS)
        endpoint, close = server.endpoint, server.close
    pipe.send(endpoint)
    process = psutil.Process()
    trim = ctypes.CDLL(None).malloc_trim
    while pipe.recv() == "state":
        trim(0)
        threads = frozenset(thread.name for thread in threading.enumerate())
        counts = server.rejected, server.refused, server.dropped
        pipe.send(State(process.memory_info().rss, process.num_fds(), threads, *counts))
    close()
    pipe.send((threading.active_count(), process.num_fds()))
