# SPDX-License-Identifier: Apache-2.0
"""What docs/migrating.md says about configurations is so."""

import json
import re
from pathlib import Path

import pytest

from vllm_ascend_pd.core.config import ConfigError, parse_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"


def test_the_old_configuration_is_refused_by_name_and_the_new_one_is_taken() -> None:
    old, new = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL))
    with pytest.raises(ConfigError, match="unknown key `use_ascend_direct`"):
        parse_config(old["kv_connector_extra_config"])
    config = parse_config(new["kv_connector_extra_config"])
    assert config.metaserver_allowlist == ("https://proxy.example:8000",)
    assert config.tls_config is not None
    assert config.tls_config.ssl_enable
    kept = {key: value for key, value in old["kv_connector_extra_config"].items() if key != "use_ascend_direct"}
    declared = parse_config(kept)
    assert declared.prefill is not None
    assert declared.decode is not None
    assert (declared.prefill["tp_size"], declared.decode["dp_size"]) == (8, 2)
