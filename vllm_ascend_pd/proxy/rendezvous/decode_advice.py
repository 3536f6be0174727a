# SPDX-License-Identifier: Apache-2.0
"""What the proxy tells decode before decode decides who computes a request's prompts."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import BY_PREFILL, PREFILL_AVAILABLE, PREFILL_WAIT_S, WHO_COMPUTES
from vllm_ascend_pd.proxy.rendezvous.observer import Observer
from vllm_ascend_pd.proxy.routing.answers import Failure, FailureKind
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool

_LEAST_WAIT_SECONDS = 0.001
"""Shorter waits are left out: they change no decision."""


class DecodeAdvice:
    """The advice for all attempts of one client request. The task that serves the client owns it.

    Decode follows it within its own bound (`max_decode_prompt_tokens`). It posts tickets for longer prompts.
    """

    def __init__(self, prefill: EnginePool, observer: Observer, *, wanted: str | None, may_fall_back: bool) -> None:
        """
        Args:
            prefill: the prefill engines.
            observer: receives a report if decode is told that no prefill engine is well.
            wanted: who computes the prompts by the client's wish, `BY_DECODE` or `BY_PREFILL`; None: it has none.
            may_fall_back: whether decode may be told that no prefill engine is well.
        """
        self.wanted = wanted
        self._prefill = prefill
        self._observer = observer
        self._may_fall_back = may_fall_back and wanted != BY_PREFILL
        self._gone = False
        """Whether prefill engines were gone when a ticket of this request needed one."""
        self._reported = False
        """Whether the observer has its report."""
        self.without_prefill = False
        """Whether the last attempt told decode that no prefill engine is well."""

    @owned
    def params(self) -> Mapping[str, str | bool | float]:
        """Returns the `kv_transfer_params` for an attempt that begins now."""
        params: dict[str, str | bool | float] = {}
        if self.wanted is not None:
            params[WHO_COMPUTES] = self.wanted
        self.without_prefill = self._may_fall_back and (self._gone or not self._prefill.any_well())
        if self.without_prefill:
            params[PREFILL_AVAILABLE] = False
            if not self._reported:
                self._reported = True
                self._observer.asked_without_prefill()
        elif (wait := self._prefill.queue_wait()) >= _LEAST_WAIT_SECONDS:
            params[PREFILL_WAIT_S] = round(wait, 3)
        return params

    @owned
    def may_begin_anew(self, failure: Failure) -> bool:
        """Whether decode is to be asked once more after a failure: no prefill engine was there, and the attempt did not
        tell decode so. All later attempts tell it."""
        if failure.kind is not FailureKind.NO_PREFILL or self.without_prefill or not self._may_fall_back:
            return False
        self._gone = True
        return True
