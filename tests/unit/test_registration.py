# SPDX-License-Identifier: Apache-2.0
"""What `register` does in a process of an engine."""

import logging

import pytest

from vllm_ascend_pd import register


def test_warnings_are_logged_whatever_level_the_root_logger_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's own: a library may have raised that level."""
    ours, of_vllm = logging.getLogger("vllm_ascend_pd"), logging.getLogger("vllm")
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    monkeypatch.setattr(of_vllm, "handlers", [handler])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    register()
    register()
    assert ours.handlers == [handler]
    logging.root.manager._clear_cache()  # type: ignore[attr-defined]
    assert logging.getLogger("vllm_ascend_pd.decode.scheduler").isEnabledFor(logging.WARNING)
