# SPDX-License-Identifier: Apache-2.0
"""Options of the hostile suite.

`--inputs N`: the total number of inputs for the decoders. The default is 20,000. From 1,000,000 on, listeners get more
messages in proportion, too.
`--fuzz-seed`: the seed of all inputs. A failure names it.
"""

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
