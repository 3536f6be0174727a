#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# compile_once.sh COMPILER ARGUMENT...: a compiler launcher for CMake. Each C++ source, npu_ops.cpp above all, is
# compiled once for all builds that name the same folder as COMPILED: no object depends on where a toolkit lies.
set -euo pipefail
if [[ " $* " != *" -MF "* ]]; then exec "$@"; fi  # CMake tries its compiler
object=$(sed -E 's/.* -o ([^ ]+) .*/\1/' <<<"$*")
kept=$COMPILED/${object##*/}
if [[ ! -e $kept ]]; then
  "$@"
  cp "$object" "$kept"
  cp "$object.d" "$kept.d"
fi
cp "$kept" "$object"
cp "$kept.d" "$object.d"
