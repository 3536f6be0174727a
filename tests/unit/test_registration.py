# SPDX-License-Identifier: Apache-2.0
"""What `register` does in a process of an engine."""

import logging
from collections.abc import Iterator

import pytest

from vllm_ascend_pd import register

OURS, OF_VLLM = logging.getLogger("vllm_ascend_pd"), logging.getLogger("vllm")


@pytest.fixture
def root_without_warnings() -> Iterator[None]:
    """A library has raised the root logger's level."""
    levels = [(logger, logger.level) for logger in (logging.root, OURS)]
    logging.root.setLevel(logging.ERROR)
    OURS.setLevel(logging.NOTSET)
    yield
    for logger, level in levels:
        logger.setLevel(level)


@pytest.mark.usefixtures("root_without_warnings")
def test_warnings_are_logged_as_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    monkeypatch.setattr(OF_VLLM, "handlers", [handler])
    monkeypatch.setattr(OURS, "handlers", [])
    register()
    register()
    assert OURS.handlers == [handler]
    assert logging.getLogger("vllm_ascend_pd.decode.scheduler").isEnabledFor(logging.WARNING)
