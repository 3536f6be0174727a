# SPDX-License-Identifier: Apache-2.0
"""`--inputs N`: how many inputs the decoders get in all, 20,000 unless told; the long form is 1,000,000 and more, and
sends listeners that many times more messages too. `--fuzz-seed`: of all of them; a failure names it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--inputs", type=int, default=20_000, help="hostile inputs for the decoders, in all")
    parser.addoption("--fuzz-seed", type=int, default=0, help="seed of hostile inputs")


@pytest.fixture(scope="session")
def inputs(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--inputs"))


@pytest.fixture(scope="session")
def fuzz_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fuzz-seed"))
