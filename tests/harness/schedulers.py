# SPDX-License-Identifier: Apache-2.0
"""The schedulers of both sides, as the connector builds them, without a connector."""

from collections.abc import Sequence
from typing import Any, Literal

from vllm_ascend_pd.connector.vllm_blocks import VllmBlocks
from vllm_ascend_pd.connector.vllm_requests import VllmRequests
from vllm_ascend_pd.core.caches import CacheGroup
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.engine_view import EngineSteps
from vllm_ascend_pd.core.hosts import AnyHost
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.decode.intents import Intents
from vllm_ascend_pd.decode.prefill_client import PrefillClient
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.tickets import EngineInfo, TicketIssuer, TicketRecipients
from vllm_ascend_pd.decode.who_computes import PromptPlacement
from vllm_ascend_pd.observe.stats import DecodeSchedulerStats
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission
from vllm_ascend_pd.transport.peers import Peers
from vllm_ascend_pd.transport.wakeup import IdleWait

FAILED_WAIT_S = 10.0
"""How long requests of a decode scheduler wait for prefill to stop writing, after their transfers have failed."""
DUE_S = 60.0
"""How long a prompt that prefill has computed waits for decode's blocks."""


def prefill_scheduler(
    groups: Sequence[CacheGroup],
    admission: TicketAdmission | None = None,
    *,
    pool: Any = None,
    media_hashing: str = "",
    allow_other_media: bool = False,
    names_all_preempted: bool = VllmRequests.names_all_preempted,
) -> PrefillScheduler:
    """A prefill engine's scheduler. It serves every ticket unless `admission` says otherwise."""
    requests = VllmRequests(media_hashing, allow_other_media)
    requests.names_all_preempted = names_all_preempted
    admission = admission or TicketAdmission(AnyHost())
    return PrefillScheduler(groups, requests, blocks_of(pool), IdleWait(0.05, in_flight=2), admission)


def decode_scheduler(
    engine: EngineInfo,
    groups: Sequence[CacheGroup],
    metaserver: Any,
    secret: Secret | None = None,
    media_hashing: str = "",
    *,
    longest: int | Literal["auto"] | None = None,
    may_compute: bool = False,
    idle: IdleWait | None = None,
) -> DecodeScheduler:
    """A decode engine's scheduler, which counts, and has all prompts computed by prefill. It closes `metaserver`.

    longest: its `prefill_first_tokens`.
    may_compute: it computes prompts that prefill has failed to compute before they got blocks.
    idle: how long its steps wait; None: as in engines without ranks of their own.
    """
    observer = DecodeSchedulerStats()
    requests = VllmRequests(media_hashing)
    issuer = TicketIssuer(engine, groups, requests, secret, lifetime_s=480.0)
    blocks = VllmBlocks(groups)
    placement = ConnectorConfig(who_computes="prefill")
    who = PromptPlacement(requests, blocks, placement, EngineSteps(2048, in_flight=2), observer)
    recipients = TicketRecipients(metaserver, PrefillClient(Peers(None, AnyHost(), AnyHost())))
    idle, intents = idle or IdleWait(0.05, in_flight=2), Intents(longest, issuer, requests, recipients, DUE_S)
    return DecodeScheduler(
        issuer, requests, blocks, recipients, who, idle, FAILED_WAIT_S, intents, may_compute, observer
    )


def blocks_of(pool: Any, groups: Sequence[CacheGroup] = ()) -> VllmBlocks:
    """vLLM's blocks, with a block pool unless that is None."""
    blocks = VllmBlocks(groups)
    if pool is not None:
        blocks.bind(pool)
    return blocks
