# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the types that check the configuration."""

import ast
import inspect
import sys
import textwrap
from pathlib import Path

import msgspec

from vllm_ascend_pd.core.config import TlsConfig, UserConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """\
# Configuration

The connector's own keys. `scripts/config_reference.py` makes this page from `vllm_ascend_pd/core/config.py`.

## `kv_connector_extra_config`

A part of vLLM's `--kv-transfer-config`, next to `kv_connector`, `kv_role` and `kv_port`. Each key has a default that
works. An engine with an unknown key, or a value that cannot work, does not start, and its error names the key.
"""

_TYPES = {
    "str | None": "string",
    "tuple[str, ...]": "list of strings",
    "_Seconds": "number",
    "_UpToADay": "number",
    "_UpToADay | None": "number",
    "_LeaseSeconds": "number",
    "_WriteSeconds": "number",
    "_Share": "number",
    "Literal['off', 'all'] | _Share": "`off`, `all` or number",
    "bool": "true or false",
    "_NotNegative": "whole number",
    "_NotNegative | None": "whole number",
    "_NotNegative | Literal['auto'] | None": "`auto` or whole number",
    "_Positive | None": "whole number",
    "_Port | None": "whole number",
    "TlsConfig | None": "object",
    "str": "string",
    "dict[str, Any] | None": "object",
    "Literal['auto', 'prefill', 'never']": "`auto`, `prefill` or `never`",
}


def documented(struct: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Returns name -> (type, docstring) of each field. Raises ValueError for a field without a docstring."""
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
    """Returns a Markdown table of key, type, default and meaning."""
    defaults = {field.name: shown_default(field) for field in msgspec.structs.fields(struct)}
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, (kind, text) in documented(struct).items():
        shown = _TYPES[kind]
        rows.append(f"| `{name}` | {shown} | {defaults[name]} | {text} |")
    return "\n".join(rows)


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "needed"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return f"`{msgspec.json.encode(value).decode()}`"


def said_of(struct: type[msgspec.Struct]) -> str:
    return " ".join(inspect.cleandoc(struct.__doc__ or "").split()) + "\n"


def page() -> str:
    parts = [HEAD, table(UserConfig)]
    parts += ["\n### `tls_config`\n", said_of(TlsConfig), table(TlsConfig)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}", file=sys.stderr)
