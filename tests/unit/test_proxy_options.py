# SPDX-License-Identifier: Apache-2.0
"""Numbers that the proxy cannot use are refused, with the name of their option."""

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vllm_ascend_pd.cli import app

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")
NUMBERS = [
    option
    for param in get_command(app).commands["proxy"].params  # type: ignore[attr-defined]
    for option in param.opts
    if option.endswith(("-timeout", "-interval", "-attempts", "-mib", "-after", "-concurrent", "-engine"))
    or "-per-" in option
]


@pytest.mark.parametrize("option", NUMBERS)
def test_a_negative_number_is_refused_by_its_option(option: str) -> None:
    done = CliRunner().invoke(app, ["proxy", "--port", "0", *ENGINES, option, "-1"])
    assert done.exit_code == 2
    assert f"{option} must " in " ".join(done.output.split())


def test_the_numbers() -> None:
    assert {"--read-timeout", "--max-body-mib", "--queue-per-engine", "--prefill-attempts"} <= set(NUMBERS)
    assert len(NUMBERS) >= 15
