# SPDX-License-Identifier: Apache-2.0
# Shared by launch_prefill.sh, launch_decode.sh and launch_cluster.sh: becomes a module of this package.
# shellcheck shell=bash

become() { # become MODULE ARGUMENT...
  local script=${0##*/} wanted=${PYTHON:-${VENV:+$VENV/bin/python}} python
  local what_to_set="set PYTHON to the Python, or VENV to the environment, in which vllm-ascend-pd is installed"
  wanted=${wanted:-python3}
  python=$(command -v "$wanted") || {
    echo "${script%.sh}: $wanted not found: $what_to_set" >&2
    exit 1
  }
  # In the repository's folder Python finds the package without its dependencies, so two of these are looked for as well.
  "$python" -c 'import sys, importlib.util as i
sys.exit(not all(map(i.find_spec, ("vllm_ascend_pd", "msgspec", "typer"))))' || {
    echo "${script%.sh}: vllm-ascend-pd is not installed for $python: $what_to_set" >&2
    exit 1
  }
  exec "$python" -m "$@"
}
