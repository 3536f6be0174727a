# SPDX-License-Identifier: Apache-2.0
"""Checks whether a prefill rank and a decode engine are configured so that the rank may send to it."""

import logging

from vllm_ascend_pd.core.compatibility import different_settings, mismatch
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.core.transports import TransportInfo, cannot_write

logger = logging.getLogger(__name__)


class FitCheck:
    """Checks decode engines for one prefill rank. Immutable."""

    def __init__(
        self, rank_info: RankInfo, config: ConnectorConfig, caches: RankCaches, transport: TransportInfo
    ) -> None:
        self._rank_info = rank_info
        self._config = config
        self._caches = caches
        self._transport = transport

    def misfit(self, description: EngineDescription) -> str | None:
        """Returns why this rank cannot send to the decode engine that described itself, None if it can.

        Warns of differences that are allowed but cost something.
        """
        declared, rank_info = self._config.decode, self._rank_info
        if declared is not None and declared.tp_size not in (None, description.tp):
            return f"config says decode's tp_size is {declared.tp_size}, decode's is {description.tp}"
        if declared is not None and declared.pp_size not in (None, description.pp):
            return f"config says decode's pp_size is {declared.pp_size}, decode's is {description.pp}"
        if description.draft not in ("", rank_info.draft):
            logger.warning(
                "decode engine %s drafts with %s, prefill with %s: the draft's KV of prompts is not sent, and fewer of "
                "its tokens will be accepted",
                description.engine_id,
                description.draft,
                rank_info.draft or "no layers of its own",
            )
        whole = rank_info.pp == 1
        reason = mismatch(self._caches, rank_info.model, rank_info.rank, rank_info.sharding, whole, description)
        if reason is not None:
            return reason
        for rank in description.ranks:
            if (reason := cannot_write(self._transport, rank.transport)) is not None:
                return reason
        different = different_settings(rank_info.settings, description.settings)
        if different is not None and self._config.allow_other_model:
            logger.warning(
                "decode engine %s: %s: allow_other_model is set, so answers may be wrong",
                description.engine_id,
                different,
            )
            return None
        return different
