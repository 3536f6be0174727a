# SPDX-License-Identifier: Apache-2.0
# Shared by launch_prefill.sh, launch_decode.sh and launch_cluster.sh, which source it with `root` (the repository) set.
# shellcheck shell=bash

: "${root:?}"
script=${0##*/}
script=${script%.sh}
dry_run=
variables=() # names, in the order in which they were preset
declare -A why origin

die() { # invalid options
  printf '%s: %s\n' "$script" "$*" >&2
  exit 2
}

fail() { # valid options, but it cannot work here
  printf '%s: %s\n' "$script" "$*" >&2
  exit 1
}

# --- the environment ---------------------------------------------------------------------------------------

preset() { # preset NAME VALUE WHY: exports the value unless the environment has one
  variables+=("$1")
  why[$1]=$3
  if [[ -v $1 ]]; then
    origin[$1]="set by you; else $2"
  else
    printf -v "$1" %s "$2"
  fi
  export "${1?}"
}

known() { # known NAME WHY: sets nothing; exports and shows the value if the environment has one
  why[$1]=$2
  unset_variables+=("$1")
  if [[ -v $1 ]]; then
    variables+=("$1")
    origin[$1]="set by you"
    export "${1?}"
  fi
}
unset_variables=()

# Secrets (VLLM_API_KEY, HF_TOKEN, ...) come from a file with NAME=VALUE lines that only its owner can read, because
# every user can read command lines and hosts.yaml.
secret_names=()
read_env_file() { # read_env_file FILE
  local file=$1 mode line name
  [[ -f $file ]] || fail "--env-file $file: no such file"
  mode=$(stat -L -c %a -- "$file")
  (((8#$mode & 8#077) == 0)) || fail "--env-file $file has mode $mode, so other users can access it: chmod 600 it"
  while IFS= read -r line || [[ $line ]]; do
    [[ $line =~ ^[[:space:]]*(#|$) ]] && continue
    name=${line%%=*}
    [[ $line == *=* && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--env-file $file: a line is not NAME=VALUE"
    export "$name=${line#*=}"
    secret_names+=("$name")
  done <"$file"
}

# Every variable that an Ascend engine depends on, with its value and purpose. Values are those of vllm-ascend's guides
# to prefill/decode disaggregation (0.23) unless the purpose says otherwise.
npu_environment() {
  preset VLLM_HOST_IP "$address" "address of this node, on which the connector listens and which tickets name"
  preset HCCL_IF_IP "$address" "address at which HCCL's ranks find each other"
  preset HCCL_SOCKET_IFNAME "$interface" "network interface of HCCL_IF_IP"
  preset GLOO_SOCKET_IFNAME "$interface" "network interface of torch's gloo groups, for small exchanges on the CPU"
  preset TP_SOCKET_IFNAME "$interface" "network interface of torch's TensorPipe"
  preset ASCEND_RT_VISIBLE_DEVICES "$devices" "NPU numbers of this engine; engines of a node must not share NPUs"
  preset PYTORCH_NPU_ALLOC_CONF expandable_segments:True "reduces memory fragmentation"
  preset HCCL_BUFFSIZE "$hccl_buffer_mb" "buffer of each HCCL communicator in MB; expert-parallel decode needs more"
  preset HCCL_OP_EXPANSION_MODE AIV "runs the model's collectives on vector cores, which is faster for small ones; the connector's use their own mode"
  preset HCCL_CONNECT_TIMEOUT 1200 "seconds that ranks wait for each other; loading weights takes minutes (HCCL's default: 120)"
  preset TASK_QUEUE_ENABLE 1 "torch_npu launches kernels from a second thread, which hides their cost"
  preset OMP_NUM_THREADS 10 "CPU threads per rank; ranks * threads should not exceed the number of cores"
  preset OMP_PROC_BIND false "does not bind threads to cores, because all ranks would bind to the same ones"
  known ASCEND_CONNECT_TIMEOUT "timeout in ms for connecting to a peer NPU; the connector sets it to write_timeout_s"
  known ASCEND_TRANSFER_TIMEOUT "timeout in ms of one transfer; the connector sets it to write_timeout_s, or to RoCE's retry time"
  known MC_TRANSFER_TIMEOUT "seconds after which Mooncake gives up a batch; the connector sets an hour and waits for the batch's end"
  known ASCEND_THREAD_POOL_SIZE "batches that Mooncake transfers at a time, at most 16; the connector sets 16"
  known ASCEND_BASE_PORT "first port on which Mooncake listens for NPUs (20000); --kv-port must not be one of these ports"
  known MC_LOG_LEVEL "Mooncake's log level: INFO, WARNING or ERROR (the connector's default on NPUs)"
  known MOONCAKE_CONFIG_PATH "JSON file of a Mooncake KV pool (--beside)"
  known HCCL_RDMA_TIMEOUT "RoCE retries after 4.096 us * 2 ^ this value (20); determines how soon a lost link is noticed"
  known HCCL_RDMA_RETRY_CNT "number of RoCE's retries (7)"
  known HCCL_RDMA_TC "traffic class of RoCE packets, as the switches' lossless queue expects"
  known HCCL_RDMA_SL "service level of RoCE packets, as HCCL_RDMA_TC"
  if [[ $device == a2 ]]; then
    known HCCL_INTRA_PCIE_ENABLE "A2: 1 with HCCL_INTRA_ROCE_ENABLE=0 makes expert exchange of several nodes hierarchical"
    known HCCL_INTRA_ROCE_ENABLE "A2: 1 takes RoCE inside a server too, as where its NPUs have no full HCCS mesh"
  else
    known ASCEND_ENABLE_USE_FABRIC_MEM "A3: 1 lets Mooncake reach host memory of a super node over HCCS (KV pools)"
  fi
  if [[ $executor == ray ]]; then
    preset RAY_ADDRESS auto "vLLM joins the Ray cluster that runs here, and fails if there is none"
    preset RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES 1 "vLLM chooses the NPUs, not Ray"
  fi
}

# vLLM's CPU backend, for tests on a machine without NPUs.
cpu_environment() {
  preset VLLM_HOST_IP "$address" "address of this node, on which the connector listens and which tickets name"
  preset VLLM_LOOPBACK_IP "$address" "address for the processes of one engine"
  preset GLOO_SOCKET_IFNAME "$interface" "network interface of torch's gloo groups"
  preset VLLM_CPU_OMP_THREADS_BIND nobind "does not bind threads to cores, because several engines share them"
  preset OMP_NUM_THREADS 1 "CPU threads per rank"
}

engine_environment() {
  if [[ $device == cpu ]]; then cpu_environment; else npu_environment; fi
  if [[ $beside ]]; then
    preset PYTHONHASHSEED 0 "a KV pool finds blocks by hash, which must be the same on all engines"
  fi
  preset VLLM_NO_USAGE_STATS 1 "sends no usage statistics to the vLLM project"
  known VLLM_LOGGING_LEVEL "vLLM's log level: DEBUG, INFO, WARNING or ERROR"
  known HF_HUB_OFFLINE "1: loads models only from disk"
}

# CANN's environment, for shells that have not loaded it.
cann_files() {
  [[ $device == cpu || ${ASCEND_HOME_PATH:-} ]] && return
  printf '%s\n' "${ASCEND_TOOLKIT_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"
  printf '%s\n' "${ASCEND_ATB_ENV:-/usr/local/Ascend/nnal/atb/set_env.sh}"
}

load_cann() {
  local file
  while IFS= read -r file; do
    [[ -r $file ]] || fail "CANN's environment is not loaded, and $file does not exist: \`source\` its set_env.sh first"
    set +u # set_env.sh uses unset variables
    # shellcheck disable=SC1090
    source "$file"
    set -u
  done < <(cann_files)
}

# --- running -----------------------------------------------------------------------------------------------

find_python() {
  local wanted=${PYTHON:-${VENV:+$VENV/bin/python}}
  wanted=${wanted:-python3}
  python=$(command -v "$wanted") || fail "$wanted not found: $what_to_set"
}
what_to_set="set PYTHON to the Python, or VENV to the environment, in which vllm-ascend-pd is installed"

# In the repository's folder Python finds the package without its dependencies, so two of these are looked for as well.
check_python() {
  "$python" -c 'import sys, importlib.util as i
sys.exit(not all(map(i.find_spec, ("vllm_ascend_pd", "msgspec", "typer"))))' ||
    fail "vllm-ascend-pd is not installed for $python: $what_to_set"
}

sibling() { # sibling COMMAND: the one in $python's environment, else in PATH
  local own=${python%/*}/$1
  if [[ -x $own ]]; then printf '%s\n' "$own"; else printf '%s\n' "$1"; fi
}

quoted() { # quoted WORD: quotes it for a shell if necessary
  if [[ $1 =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then printf '%s' "$1"; else printf '%s' "${1@Q}"; fi
}

# Prints a shell script equivalent to `run`. Names the secrets of --env-file without their values.
show() { # show COMMAND...
  local name file word
  while IFS= read -r file; do
    printf 'source %s\n' "$(quoted "$file")"
  done < <(cann_files)
  for name in "${variables[@]}"; do
    printf '# %s: %s%s\n' "$name" "${why[$name]}" "${origin[$name]:+ (${origin[$name]})}"
    printf 'export %s=%s\n' "$name" "$(quoted "${!name}")"
  done
  for name in "${secret_names[@]}"; do
    printf '# %s: from %s\n' "$name" "$env_file"
  done
  ((${#ray_wait[@]} == 0)) || show_words "${ray_wait[@]}"
  show_words exec "$@"
}

show_words() { # show_words WORD...
  local word
  printf '%s' "$1"
  for word in "${@:2}"; do printf ' %s' "$(quoted "$word")"; done
  printf '\n'
}

ray_wait=() # waits until this host is in a Ray cluster
run() { # run COMMAND...
  if [[ $dry_run ]]; then
    show "$@"
    exit
  fi
  command -v "$1" >/dev/null || fail "$1 not found: $what_to_set"
  load_cann
  ((${#ray_wait[@]} == 0)) || "${ray_wait[@]}" || fail "no Ray cluster has started on this host"
  exec "$@"
}

comment() { # the comment at the top of a file
  sed -n '3,/^[^#]/{s/^# \{0,1\}//p}' "$1"
}

engine_help() {
  local name
  sed -n '/^# Options of both/,/^$/{s/^# \{0,1\}//p}' "$root/scripts/launch_common.sh"
  for name in "${variables[@]}"; do
    printf '  %s=%s\n      %s\n' "$name" "${!name}" "${why[$name]}"
  done
  for name in "${unset_variables[@]}"; do
    [[ -v $name ]] || printf '  %s (not set)\n      %s\n' "$name" "${why[$name]}"
  done
}

# Options of both (scripts/launch_prefill.sh, scripts/launch_decode.sh):
#
#   --model PATH            model to serve; --served-model-name NAME: its name for clients
#   --device DEVICE         a2, a3 (Atlas servers with 8 and 16 NPUs as vLLM counts them), or cpu, for tests
#   --address IP            address at which other nodes reach this one (cpu: 127.0.0.1)
#   --interface NAME        network interface that has --address (default: found with `ip`; cpu: lo)
#   --port PORT             HTTP port of the engine (8100 for prefill, 8200 for decode)
#   --listen ADDRESS        address to listen on (default: --address)
#   --tp, --pp, --dp SIZE   tensor-, pipeline- and data-parallel size of the engine (1 each)
#   --devices LIST          NPUs of this node, such as 0,1,2,3 (default: the first ones, as many as needed)
#   --nodes N               number of nodes of the engine (1); run the script on each, with the same options except:
#   --node-rank R           number of this node, 0 to N-1; node 0 serves HTTP
#   --head-address HOST     address of node 0, for the others; --head-port PORT: a free port there (13345)
#   --executor mp|ray       ray: the nodes are a Ray cluster, and the script runs only on its first node;
#   --ray-node              starts one node of the Ray cluster instead of vLLM, with the same environment
#   --engine-id ID          engine id in tickets, kept over restarts (default: a new one for each start)
#   --side-channel-keys FILE, --ticket-secret FILE
#                           files from `vllm-ascend-pd keygen`, the same on all engines
#   --beside FILE           JSON object of another connector, such as a KV pool's, to run in a MultiConnector
#   --extra KEY=VALUE       any other key of kv_connector_extra_config (docs/configuration.md); may be repeated
#   --env-file FILE         NAME=VALUE lines with secrets (VLLM_API_KEY, HF_TOKEN, ...), mode 0600
#   --dry-run               print the environment and the command as a shell script, and start nothing
#   -- ARGUMENT...          all further arguments go to `vllm serve`; its access log omits /health and /metrics
#                           unless --disable-access-log-for-endpoints is given
#
# PYTHON (default: $VENV/bin/python, else python3) is the Python with vLLM. VLLM and RAY are the commands (default:
# those beside PYTHON). Exits with 2 and a reason if options contradict each other. If CANN's environment is not loaded, loads
# it from ASCEND_TOOLKIT_ENV and ASCEND_ATB_ENV (default: set_env.sh at the usual paths).
#
# Environment variables, their default values, and their purpose:

# Parses the options, then starts the engine or prints the command.
launch_engine() { # launch_engine ROLE DEFAULT_PORT HCCL_BUFFER_MB ARGUMENT...
  local role=$1 port=$2 hccl_buffer_mb=$3 help='' ray_node='' value options=() rest=() words=() output program ray
  local device='' address='' interface='' devices='' env_file='' beside='' executor=mp
  shift 3
  while (($#)); do
    case $1 in
      -h | --help) help=1 ;;
      --dry-run) dry_run=1 ;;
      --ray-node)
        ray_node=1
        options+=("$1")
        ;;
      --)
        shift
        rest=("$@")
        break
        ;;
      --*=*) # --NAME=VALUE is --NAME VALUE
        set -- "${1%%=*}" "${1#*=}" "${@:2}"
        continue
        ;;
      --*)
        value=${2-}
        case $1 in
          --device) device=$value ;;
          --address) address=$value ;;
          --interface) interface=$value ;;
          --devices) devices=$value ;;
          --env-file) env_file=$value ;;
          --port) port=$value ;;
          --beside) beside=$value options+=("$1" "$value") ;;
          --executor) executor=$value options+=("$1" "$value") ;;
          --model | --listen | --served-model-name | --tp | --pp | --dp | --nodes | --node-rank | --head-address | \
            --head-port | --engine-id | --side-channel-keys | --ticket-secret | --extra | --decode-host | --kv-port | \
            --load-failure-policy | --metaserver | --metaserver-token) options+=("$1" "$value") ;;
          *) die "unknown option $1; see --help" ;;
        esac
        (($# > 1)) || die "$1 needs a value; see --help"
        shift
        ;;
      *) die "unknown argument $1: arguments for vLLM go after --; see --help" ;;
    esac
    shift
  done
  if [[ $help ]]; then
    comment "$0"
    device=${device:-a3} address=${address:-IP} interface=${interface:-NAME} devices=${devices:-0,1,...}
    engine_environment
    engine_help
    exit
  fi

  case $device in
    cpu) address=${address:-127.0.0.1} ;;
    a2 | a3) ;;
    '') die "--device is missing: must be a2, a3 or cpu" ;;
    *) die "--device $device: must be a2, a3 or cpu" ;;
  esac
  [[ $address ]] || die "--address is missing: other nodes need it to reach this one"
  [[ $device != cpu || $executor != ray ]] || die "--executor ray: vLLM's CPU backend does not run on Ray"
  [[ $device != cpu || ! $devices ]] || die "--devices: the CPU backend has no NPUs"
  find_python
  check_python
  output=$("$python" -m vllm_ascend_pd.tools.launch.engine --role "$role" --device "$device" --address "$address" \
    --port "$port" "${options[@]}" -- "${rest[@]}") || exit
  mapfile -t words <<<"$output"
  choose_devices "${words[0]}"
  choose_interface
  engine_environment
  if [[ $env_file ]]; then
    read_env_file "$env_file"
  fi
  ray=${RAY:-$(sibling ray)} program=${VLLM:-$(sibling vllm)}
  if [[ $ray_node ]]; then
    program=$ray
  elif [[ $executor == ray ]]; then # its Ray cluster may just be starting
    ray_wait=(timeout --foreground 600 bash -c "until \"\$0\" status &>/dev/null; do sleep 1; done" "$ray")
  fi
  run "$program" "${words[@]:1}"
}

choose_devices() { # choose_devices COUNT
  local -A seen=()
  local one listed number='(0|[1-9][0-9]{0,5})' most=16
  [[ $device == cpu ]] && return
  if [[ ! $devices && ! -v ASCEND_RT_VISIBLE_DEVICES ]]; then
    devices=$(seq -s , 0 $(($1 - 1)))
    return
  fi
  if [[ $devices && ${ASCEND_RT_VISIBLE_DEVICES-$devices} != "$devices" ]]; then
    die "--devices $devices contradicts ASCEND_RT_VISIBLE_DEVICES=$ASCEND_RT_VISIBLE_DEVICES"
  fi
  devices=${devices:-$ASCEND_RT_VISIBLE_DEVICES}
  [[ $devices =~ ^$number(,$number)*$ ]] || die "--devices $devices: must be numbers, such as 0,1,2"
  [[ $device != a2 ]] || most=8
  IFS=, read -ra listed <<<"$devices"
  for one in "${listed[@]}"; do
    ((one < most)) || die "--devices $devices: ${device^^} servers have NPUs 0 to $((most - 1)), not $one"
    [[ ! -v seen[$one] ]] || die "--devices $devices: $one is listed twice"
    seen[$one]=1
  done
  ((${#listed[@]} == $1)) || die "--devices $devices lists ${#listed[@]} NPUs, but the engine needs $1 on this node"
}

choose_interface() {
  [[ $interface ]] && return
  if [[ $device == cpu && $address == 127.* ]]; then
    interface=lo
    return
  fi
  interface=${GLOO_SOCKET_IFNAME:-$(ip -o addr show to "$address" 2>/dev/null | awk '{print $2; exit}' || true)}
  [[ $interface ]] || die "--interface is missing: no interface with $address was found"
}
