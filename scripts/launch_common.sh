# SPDX-License-Identifier: Apache-2.0
# Shared by launch_prefill.sh, launch_decode.sh and launch_proxy.sh: their options, the environment of an engine, and
# `run`, which becomes the command or prints it.
# shellcheck shell=bash

dry_run='' cpu='' env_file=''
arguments=()  # behind the script's own options
settings=()   # names of variables that are set here
from_file=()  # names of variables of --env-file
cann_files=() # what loads CANN's environment

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 2
}

# What to do instead of an option of an earlier version.
replacement() { # replacement OPTION
  case ${1%%=*} in
    --device) echo 'leave it out on NPUs; --cpu is for the CPU' ;;
    --address) echo 'set VLLM_HOST_IP' ;;
    --nodes | --node-rank | --head-address | --head-port)
      echo "give vLLM's own options for several nodes, behind the model" ;;
    --kv-port | --load-failure-policy | --secret-file | --beside | --extra)
      echo "give vLLM's --kv-transfer-config, behind the model" ;;
  esac
}

# Takes this script's options. The rest becomes `arguments`.
read_options() { # read_options ARGUMENT...
  local instead
  while (($#)); do
    case $1 in
      --dry-run) dry_run=yes ;;
      --cpu) cpu=yes ;;
      --env-file=*) env_file=${1#*=} ;;
      --env-file)
        (($# > 1)) || die '--env-file needs a file'
        env_file=$2
        shift ;;
      -h | --help)
        sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" # the comment at the top of the script
        exit ;;
      --) shift && break ;;
      *) break ;;
    esac
    shift
  done
  if instead=$(replacement "${1-}") && [[ $instead ]]; then
    die "there is no option ${1%%=*} any more: $instead (docs/migrating.md)"
  fi
  arguments=("$@")
  [[ ! $env_file ]] || read_env_file
}

# Every user can read command lines. So secrets come from a file that only its owner can read.
read_env_file() {
  local line mark=$'\xef\xbb\xbf' # a byte order mark
  [[ -f $env_file && -r $env_file ]] || die "--env-file $env_file: there is no such file, or it cannot be read"
  [[ $(stat -Lc %a -- "$env_file") == [46]00 ]] || die "--env-file $env_file: other users can access it: chmod 600 it"
  while IFS= read -r line || [[ $line ]]; do
    line=${line#"$mark"}
    [[ ! $line =~ ^[[:space:]]*(#|$) ]] || continue
    [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || die "--env-file $env_file: a line is not NAME=VALUE"
    export "${line?}"
    from_file+=("${line%%=*}")
  done <"$env_file"
}

setting() { # setting NAME VALUE: exports a variable, with your own value if you have set it
  export "$1=${!1-$2}"
  settings+=("$1")
}

need_address() {
  [[ ${VLLM_HOST_IP:-} ]] || die 'set VLLM_HOST_IP to the address at which other hosts reach this one'
}

# Values for NPUs are those of vllm-ascend's guides to prefill/decode disaggregation (0.23) unless a comment says more.
engine_environment() { # engine_environment HCCL_BUFFER_MB
  local interface file
  setting VLLM_NO_USAGE_STATS 1 # sends no usage statistics to the vLLM project
  if [[ $cpu ]]; then
    setting VLLM_HOST_IP 127.0.0.1               # where the connector listens, and what tickets name
    setting VLLM_LOOPBACK_IP "$VLLM_HOST_IP"     # address for the processes of one engine
    setting GLOO_SOCKET_IFNAME lo                # network interface of torch's gloo groups
    setting VLLM_CPU_OMP_THREADS_BIND nobind     # binds no threads to cores, because several engines share them
    setting OMP_NUM_THREADS 1                    # CPU threads per rank
    return
  fi
  need_address
  settings+=(VLLM_HOST_IP) # where the connector listens, and what tickets name
  interface=${GLOO_SOCKET_IFNAME:-$(ip -o address show to "$VLLM_HOST_IP" 2>/dev/null | awk 'NR == 1 {print $2}')} || true
  [[ $interface ]] || die "no interface with the address $VLLM_HOST_IP was found: set GLOO_SOCKET_IFNAME"
  setting HCCL_IF_IP "$VLLM_HOST_IP"                      # address at which HCCL's ranks find each other
  setting HCCL_SOCKET_IFNAME "$interface"                 # its network interface
  setting GLOO_SOCKET_IFNAME "$interface"                 # of torch's gloo groups, for the CPU's exchanges
  setting TP_SOCKET_IFNAME "$interface"                   # of torch's TensorPipe
  setting PYTORCH_NPU_ALLOC_CONF expandable_segments:True # reduces memory fragmentation
  setting HCCL_BUFFSIZE "$1"                              # MB of each HCCL communicator
  setting HCCL_CONNECT_TIMEOUT 1200                       # seconds; loading weights takes minutes (HCCL's default: 120)
  setting TASK_QUEUE_ENABLE 1                             # torch_npu launches kernels from a second thread
  setting OMP_NUM_THREADS 10                              # CPU threads per rank; ranks * threads should fit the cores
  setting OMP_PROC_BIND false                             # binds no threads: all ranks would take the same cores
  [[ ! ${ASCEND_HOME_PATH:-} ]] || return 0 # CANN's environment is loaded
  cann_files=("${ASCEND_TOOLKIT_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"
    "${ASCEND_ATB_ENV:-/usr/local/Ascend/nnal/atb/set_env.sh}")
  [[ ! $dry_run ]] || return 0
  for file in "${cann_files[@]}"; do
    [[ -r $file ]] || die "CANN's environment is not loaded, and $file does not exist: source its set_env.sh first"
    set +u
    # shellcheck source=/dev/null
    source "$file"
    set -u
  done
}

# Checks that the model comes first, since vLLM takes the last of equal options: so yours win.
need_model() {
  [[ ${arguments[0]:--} != -* ]] || die "MODEL comes first, then the arguments of vllm serve; see --help"
}

# Becomes the command. With --dry-run, prints a shell script that does the same.
run() { # run PROGRAM ARGUMENT...
  local program=${VENV:+$VENV/bin/}$1 name
  shift
  if [[ $dry_run ]]; then
    for name in "${cann_files[@]}"; do echo "source ${name@Q}"; done
    for name in "${settings[@]}"; do
      [[ " ${from_file[*]} " == *" $name "* ]] || echo "export $name=${!name@Q}"
    done
    for name in "${from_file[@]}"; do echo "# $name: from $env_file"; done
    echo "exec ${program@Q} ${*@Q}"
    exit
  fi
  command -v "$program" >/dev/null || die "$program not found: set VENV to the environment with vLLM and vllm-ascend-pd"
  exec "$program" "$@"
}
