# SPDX-License-Identifier: Apache-2.0
"""Engines that a page starts on one server run beside each other: each has NPUs of its own."""

import re

import pytest

from harness.documented import REPOSITORY, lines


@pytest.mark.parametrize("page", ["README.md", "docs/routers.md"])
def test_f38_engines_of_a_page_share_no_npu(page: str) -> None:
    prefill, decode = (line for line in lines(REPOSITORY / page) if "vllm serve" in line)
    for line in (prefill, decode):
        size = re.search(r"--tensor-parallel-size (\d+)", line)
        assert len(npus(line)) == (int(size[1]) if size else 1)
    assert not set(npus(prefill)) & set(npus(decode))


def npus(line: str) -> list[str]:
    given = re.search(r"\bASCEND_RT_VISIBLE_DEVICES=(\S+) ", line)
    assert given is not None, line
    return given[1].split(",")
