# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the types that configuration is checked with."""

import ast
import inspect
import sys
import textwrap
from pathlib import Path

import msgspec

from vllm_ascend_pd.config import ConnectorConfig, PeerParallel, TlsConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """\
# Configuration

Made by `scripts/config_reference.py` from `vllm_ascend_pd/config.py`; a test compares the two.

## `kv_connector_extra_config`

A part of vLLM's `--kv-transfer-config`, next to `kv_connector`, `kv_role` and `kv_port`. Each key has a default that
works; an unknown key, or a value that cannot work, ends the start of the engine with an error that names it.
"""

_TYPES = {
    "str | None": "string",
    "tuple[str, ...]": "list of strings",
    "float": "number",
    "bool": "true or false",
    "int": "whole number",
    "int | None": "whole number",
    "PeerParallel | None": "object",
    "TlsConfig | None": "object",
}


def documented(struct: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Name -> (type, what the string below the field says). Raises ValueError for a field without one."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    body = definition.body
    for field, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        assert isinstance(field.target, ast.Name)
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                found[field.target.id] = (ast.unparse(field.annotation), " ".join(text.split()))
            case _:
                raise ValueError(f"{struct.__name__}.{field.target.id} is not documented")
    return found


def table(struct: type[msgspec.Struct]) -> str:
    """A Markdown table: key, type, default, meaning."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, (kind, text) in documented(struct).items():
        shown = _TYPES[kind]
        default = msgspec.json.encode(defaults[name]).decode()
        rows.append(f"| `{name}` | {shown} | `{default}` | {text} |")
    return "\n".join(rows)


def page() -> str:
    parts = [HEAD, table(ConnectorConfig)]
    for title, struct in (("`prefill` and `decode`", PeerParallel), ("`tls_config`", TlsConfig)):
        said = " ".join(inspect.cleandoc(struct.__doc__ or "").split())
        parts += [f"\n### {title}\n", said + "\n", table(struct)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}", file=sys.stderr)
