# SPDX-License-Identifier: Apache-2.0
"""Closing: an error of one part keeps no other part from being closed."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_ascend_pd.connector.roles import VllmDecodeScheduler
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.tickets import TicketRecipients
from vllm_ascend_pd.decode.worker import DecodeWorker
from vllm_ascend_pd.prefill.control import ControlPlane
from vllm_ascend_pd.prefill.ticket_listener import TicketListener
from vllm_ascend_pd.prefill.worker import PrefillWorker

Parts = Callable[[str], Any]


class Failing:
    """A part whose `close` raises."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self._name = name
        self._closed = closed

    def close(self, timeout_s: float = 0.0) -> None:
        self._closed.append(self._name)
        raise OSError(self._name)


def made(kind: type, **fields: Any) -> Any:
    """An object that has only what its `close` needs."""
    instance = kind.__new__(kind)
    for name, value in fields.items():
        setattr(instance, name, value)
    return instance


def decode_scheduler(part: Parts) -> Any:
    nothing: Any = None
    return DecodeScheduler(
        nothing, nothing, nothing, part("recipients"), nothing, part("idle"), 0.0, nothing, False, part("observer")
    )


CLOSE: dict[str, Callable[[Parts], Callable[[], None]]] = {
    "decode scheduler": lambda part: decode_scheduler(part).close,
    "decode scheduler's role": lambda part: (
        made(
            VllmDecodeScheduler,
            _listener=part("listener"),
            _recipients=part("recipients"),
            _idle=part("idle"),
            _observer=part("observer"),
        ).close
    ),
    "ticket recipients": lambda part: (
        made(TicketRecipients, _metaserver=part("metaserver"), _prefill=part("prefill")).close
    ),
    "decode worker": lambda part: (
        lambda: made(
            DecodeWorker, _server=part("server"), _arrivals=part("arrivals"), _observer=part("observer")
        ).close(0.0)
    ),
    "prefill worker": lambda part: (
        lambda: made(
            PrefillWorker,
            _transfers={},
            _control=part("control"),
            _regrouper=part("regrouper"),
            _observer=part("observer"),
        ).close(0.0)
    ),
    "control plane": lambda part: (
        lambda: made(
            ControlPlane,
            _client=part("client"),
            _wakeup=part("wakeup"),
            _retired=[part("first"), part("second")],
            _all=list,
        ).close(0.0)
    ),
    "ticket listener": lambda part: (
        lambda: made(TicketListener, _server=part("server"), _wakeup=part("wakeup")).close(0.0)
    ),
}


@pytest.mark.parametrize("owner", CLOSE)
def test_an_error_of_one_part_keeps_no_other_from_being_closed(owner: str) -> None:
    names: list[str] = []
    closed: list[str] = []

    def part(name: str) -> Any:
        names.append(name)
        return Failing(name, closed)

    close = CLOSE[owner](part)
    with pytest.raises(OSError):  # noqa: PT011 - any of the parts' own
        close()
    assert sorted(closed) == sorted(names)
    assert len(closed) >= 2
