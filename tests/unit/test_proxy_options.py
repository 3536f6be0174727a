# SPDX-License-Identifier: Apache-2.0
"""Numbers that the proxy cannot use are refused, with the name of their option; the defaults are patient."""

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vllm_ascend_pd.cli import app
from vllm_ascend_pd.proxy.settings import ProxySettings

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


def test_defaults_are_as_patient_as_gateways_and_vllms_router() -> None:
    """vllm-router 0.1.17 serves 32,768 requests at a time, and lets 100 more wait for 60 s. nginx keeps its connections
    to servers for 60 s, some gateways for an hour. They must close one first: a request may be on its way on it."""
    settings = ProxySettings(prefill=ENGINES[1:2], decode=ENGINES[3:], metaserver_url="http://127.0.0.1:3")
    assert settings.keep_alive_timeout > 3600
    assert settings.max_concurrent + settings.max_waiting >= 32768 + 100
    assert settings.queue_timeout >= 60
    assert settings.silence_timeout >= 1800  # vllm-router's for a whole request
