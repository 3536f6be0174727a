# SPDX-License-Identifier: Apache-2.0
"""`kv_connector_extra_config`: what is understood, and what an error says."""

import re

import pytest

from vllm_ascend_pd.core.config import (
    REMOVED,
    ConfigError,
    ConnectorConfig,
    TlsConfig,
    UserConfig,
    parse_config,
)

KEYS = UserConfig.__struct_fields__
MAY_BE_ZERO = ("decode_prompt_tokens", "decode_prompt_share", "max_decode_prompt_tokens")
TIMES = [name for name in KEYS if name.endswith("_s")]


def test_every_key_has_a_default():
    assert parse_config({}) == ConnectorConfig()


def test_there_are_few_keys():
    assert len(KEYS) <= 25


def test_defaults_fit_together():
    """A grant must not outlast a transfer, and a renewal must come well before the lease ends."""
    config = ConnectorConfig()
    assert config.control_timeout_s < config.lease_s < config.transfer_timeout_s
    assert config.write_timeout_s < config.lease_s
    assert config.grant_timeout_s < config.settle_timeout_s


def test_values_as_json_brings_them():
    config = parse_config(
        {
            "lease_s": 5,
            "peers": ["http://10.0.0.1:8000", "10.0.0.0/8", "https://proxy/pd", "node-3:8998"],
            "metaserver_token_file": "/run/token",
            "transfer_protocol": "tcp",
        }
    )
    assert config.lease_s == 5.0
    assert isinstance(config.lease_s, float)
    assert config.peer_urls == ("http://10.0.0.1:8000", "https://proxy/pd")
    assert config.peer_hosts == ("10.0.0.0/8", "node-3:8998")
    assert (config.metaserver_token_file, config.transfer_protocol) == ("/run/token", "tcp")


def test_keys_of_vllm_ascends_layerwise_connector():
    config = parse_config(
        {
            "prefill": {"dp_size": 2, "tp_size": 4},
            "decode": {"dp_size": 2, "tp_size": 2, "pp_size": 1},
            "tls_config": {
                "ssl_enable": True,
                "ssl_ca_certs": "/ca.pem",
                "ssl_certfile": "/cert.pem",
                "ssl_keyfile": "/key.pem",
            },
        }
    )
    assert (config.prefill, config.decode) == ({"dp_size": 2, "tp_size": 4}, {"dp_size": 2, "tp_size": 2, "pp_size": 1})
    assert config.tls_config == TlsConfig(True, "/cert.pem", "/key.pem", ssl_ca_certs="/ca.pem")


def test_long_steps_have_fewer_staging_slots_unless_it_is_said_how_many():
    assert [ConnectorConfig().slots(tokens) for tokens in (1, 8192, 8193)] == [4, 4, 2]
    assert [ConnectorConfig(staging_slots=3).slots(tokens) for tokens in (1, 8193)] == [3, 3]


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("lease", "lease_s"),
        ("lease_ms", "lease_s"),
        ("transfer_timeout", "transfer_timeout_s"),
        ("metaserver_token", "metaserver_token_file"),
        ("Decode", "decode"),
        ("stagingslots", "staging_slots"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(key, near):
    with pytest.raises(ConfigError, match=f"unknown key `{key}`; did you mean `{near}`?"):
        parse_config({"lease_s": 5.0, key: 1})


def test_what_no_user_sets_is_refused():
    """Each key of earlier versions with what holds instead, and so every constant that tests change."""
    assert not {*REMOVED} & {*KEYS}
    assert {*ConnectorConfig.__struct_fields__} - {*KEYS} <= {*REMOVED}
    for key, instead in REMOVED.items():
        with pytest.raises(ConfigError, match=f"no key `{key}` any more: {re.escape(instead)}"):
            parse_config({key: 1})


@pytest.mark.parametrize("key", ["", "x", "tls", "完全不同", "use_ascend_direct", "lookup_rpc_port", "kv_buffer_size"])
def test_an_unknown_key_unlike_any_other(key):
    """No other is suggested."""
    with pytest.raises(ConfigError) as error:
        parse_config({key: None})
    assert str(error.value).endswith(f": unknown key `{key}`; docs/configuration.md lists all")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lease_s", "10"),
        ("staging_slots", 2.5),
        ("peers", "http://10.0.0.1:8000"),
        ("prefill", "2"),
        ("tls_config", {"ssl_ca_certs": "/ca.pem"}),
    ],
)
def test_a_value_of_the_wrong_type(key, value):
    with pytest.raises(ConfigError, match=rf"kv_connector_extra_config: .*\$\.{key}"):
        parse_config({key: value})


@pytest.mark.parametrize("name", [*TIMES, "bootstrap_port", "staging_slots"])
@pytest.mark.parametrize("value", [0, -1])
def test_times_and_sizes_are_positive(name, value):
    with pytest.raises(ConfigError, match=rf"Expected `.*` >=? .* - at `\$\.{name}`"):
        parse_config({name: value})


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_times_are_finite(name, value):
    with pytest.raises(ConfigError, match=rf"Expected `float` .* - at `\$\.{name}`"):
        parse_config({name: value})


def test_zero_switches_off_what_decode_computes():
    config = parse_config(dict.fromkeys(MAY_BE_ZERO, 0))
    assert [getattr(config, name) for name in MAY_BE_ZERO] == [0, 0, 0]


@pytest.mark.parametrize(("value", "share"), [("off", 0.0), ("all", 1.0), (0, 0.0), (0.25, 0.25), (1, 1.0)])
def test_a_share_of_requests_is_verified(value, share):
    assert parse_config({"verify_kv": value}).verified_share == share


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"lease_s": 0.5}, r"Expected `float` >= 1.0 - at `\$\.lease_s`"),
        ({"lease_s": 86401}, r"Expected `float` <= 86400.0 - at `\$\.lease_s`"),
        ({"write_timeout_s": 601}, r"Expected `float` <= 600.0 - at `\$\.write_timeout_s`"),
        ({"queue_timeout_s": 86401}, r"Expected `float` <= 86400.0 - at `\$\.queue_timeout_s`"),
        ({"hold_timeout_s": 86401}, r"Expected `float` <= 86400.0 - at `\$\.hold_timeout_s`"),
        ({"bootstrap_port": 65536}, r"Expected `int` <= 65535 - at `\$\.bootstrap_port`"),
        *(({name: -1}, rf"Expected `.*` >= 0.* - at `\$\.{name}`") for name in MAY_BE_ZERO),
        ({"decode_prompt_share": float("nan")}, r"Expected `float` >= 0.0 - at `\$\.decode_prompt_share`"),
        ({"decode_prompt_share": 1.5}, r"Expected `float` <= 1.0 - at `\$\.decode_prompt_share`"),
        ({"who_computes": "decode"}, "who_computes"),
        ({"verify_kv": "on"}, "verify_kv"),
        ({"verify_kv": 1.5}, r"Expected `float` <= 1.0 - at `\$\.verify_kv`"),
        ({"verify_kv": float("nan")}, r"Expected `float` >= 0.0 - at `\$\.verify_kv`"),
        ({"peers": ["http://p", "10.0.0.1:x"]}, "`peers`: '10.0.0.1:x' is not a host"),
        (
            {"tls_config": {"ssl_enable": True, "ssl_keyfile_password": "a", "ssl_keyfile_password_file": "/b"}},
            "a password and a file with one",
        ),
        ({"tls_config": {"ssl_enable": True, "ssl_keyfile": "/key.pem"}}, "`ssl_keyfile` without `ssl_certfile`"),
    ],
)
def test_values_out_of_range(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_config(changes)
