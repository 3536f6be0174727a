# SPDX-License-Identifier: Apache-2.0
"""Prints what pip is told about indexes as uv's variables, one a line. uv does not read pip's configuration."""

import ast
import subprocess
import sys

# pip's option, uv's variable, and what stands between its values.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}

command = [sys.executable, "-m", "pip", "config", "list"]
said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
settings: dict[str, str] = dict(line.split("=", 1) for line in said.splitlines())
for option, (variable, separator) in VARIABLES.items():
    # The first one holds. `:env:` are pip's environment variables.
    for section in (":env:", "install", "global"):
        if value := settings.get(f"{section}.{option}"):
            print(f"{variable}={separator.join(ast.literal_eval(value).split())}")
            break
# pip takes the best version of all indexes.
print("UV_INDEX_STRATEGY=unsafe-best-match")
