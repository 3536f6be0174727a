#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts the proxy in front of prefill and decode engines. It needs no NPU.
#
#   scripts/launch_proxy.sh --prefill URL... --decode URL... --address IP [OPTION...] [-- PROXY_ARGUMENT...]
#
#   --prefill URL, --decode URL
#                           engines, such as http://10.0.0.11:8100; may be repeated
#   --address HOST          this host's address: where decode engines find the proxy, to post their tickets
#   --port PORT             where it serves clients and takes tickets (8000)
#   --listen ADDRESS        on which address (default: --address)
#   --ticket-secret FILE    the cluster's, to try tickets of signing engines again
#   --metaserver-token FILE a bearer token without which it takes no ticket
#   --dry-run               print the command as a shell script, and start nothing
#   -- ARGUMENT...          everything after it goes to `vllm-ascend-pd proxy` (its --help)
#
# PYTHON (default: $VENV/bin/python, else python3) is the Python with vllm-ascend-pd in it. Exits with 2 and a reason
# for options that make no sense together.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/launch_common.sh"

device=cpu # no CANN here
env_file=
address='' listen='' port=8000 ticket_secret='' token=''
prefill=() decode=() rest=()
while (($#)); do
  case $1 in
    -h | --help)
      comment "$0"
      exit
      ;;
    --dry-run) dry_run=1 ;;
    --)
      shift
      rest=("$@")
      break
      ;;
    --*=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      continue
      ;;
    --*)
      (($# > 1)) || die "$1 needs a value; see --help"
      case $1 in
        --prefill) prefill+=("$2") ;;
        --decode) decode+=("$2") ;;
        --address) address=$2 ;;
        --listen) listen=$2 ;;
        --port) port=$2 ;;
        --ticket-secret) ticket_secret=$2 ;;
        --metaserver-token) token=$2 ;;
        *) die "unknown option $1; see --help" ;;
      esac
      shift
      ;;
    *) die "what is $1? arguments for the proxy go behind --; see --help" ;;
  esac
  shift
done

((${#prefill[@]})) || die "--prefill is missing: at least one prefill engine's URL"
((${#decode[@]})) || die "--decode is missing: at least one decode engine's URL"
[[ $address ]] || die "--address is missing: how do decode engines reach this proxy?"
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] || die "--port $port: 1 to 65535"
case $address in
  0.0.0.0 | ::) die "--address $address is no address that decode engines can reach; --listen $address listens on all" ;;
esac
for url in "${prefill[@]}" "${decode[@]}"; do
  [[ $url =~ ^https?://[^/[:space:]@?#]+/?$ ]] || die "$url: an engine's URL is such as http://10.0.0.11:8100"
done
for url in "${prefill[@]}"; do
  for other in "${decode[@]}"; do
    [[ ${url%/} != "${other%/}" ]] || die "$url is given as a prefill and as a decode engine"
  done
done

find_python
host=$address
[[ $host == *:* ]] && host="[$host]"
command=("$(sibling vllm-ascend-pd)" proxy --host "${listen:-$address}" --port "$port"
  --metaserver-url "http://$host:$port/v1/metaserver")
for url in "${prefill[@]}"; do command+=(--prefill "$url"); done
for url in "${decode[@]}"; do command+=(--decode "$url"); done
[[ ! $ticket_secret ]] || command+=(--ticket-secret-file "$ticket_secret")
[[ ! $token ]] || command+=(--metaserver-token-file "$token")
run "${command[@]}" "${rest[@]}"
