# SPDX-License-Identifier: Apache-2.0
"""What `register` does in a process of an engine."""

import logging

import pytest

from vllm_ascend_pd import register


def test_warnings_are_logged_whatever_level_the_root_logger_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's: a library may have raised it."""
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    register()
    register()
    ours, of_vllm = logging.getLogger("vllm_ascend_pd"), logging.getLogger("vllm")
    assert logging.getLogger("vllm_ascend_pd.decode.scheduler").isEnabledFor(logging.WARNING)
    assert of_vllm.handlers
    assert [each for each in ours.handlers if each in of_vllm.handlers] == of_vllm.handlers
    assert len(ours.handlers) == len(set(ours.handlers))
