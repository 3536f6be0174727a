# SPDX-License-Identifier: Apache-2.0
"""What the parts of a prefill rank share."""

from dataclasses import dataclass, field

from vllm_ascend_pd.core.caches import RegisteredCaches
from vllm_ascend_pd.core.checksum import Form
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import Observer
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.peers import Peers


@dataclass(frozen=True)
class PrefillRank:
    """One rank of a prefill engine. Any thread may use it."""

    info: RankInfo
    config: ConnectorConfig
    device: Device
    engine: TransferEngine
    caches: RegisteredCaches
    # The model's weights.
    loaded: LoadedWeights = field(default_factory=LoadedWeights)
    # Is told what the rank does.
    observer: Observer = field(default_factory=Observer)
    running_time: RunningTime = field(default_factory=RunningTime)
    # The decode engines that it serves.
    peers: Peers = field(default_factory=Peers)
    # The newest form of checksums that it takes.
    checksum_form: Form = Form.SUM_64

    def form_for(self, ticket: Ticket) -> Form:
        """Returns how it takes checksums for a ticket, which says what decode reads."""
        return Form(min(self.checksum_form, ticket.checksum_form))
