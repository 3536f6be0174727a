#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts the proxy in front of prefill and decode engines. It needs no NPU.
#
#   scripts/launch_proxy.sh --prefill URL... --decode URL... --address IP [OPTION...] [-- PROXY_ARGUMENT...]
#
#   --prefill URL, --decode URL
#                           engines, such as http://10.0.0.11:8100, or dns+http://NAME:PORT for all addresses of NAME;
#                           may be repeated; optional with -- --engines-file FILE or -- --admin-token-file FILE
#   --address HOST          address of this host, to which decode engines post tickets
#   --port PORT             port for clients and tickets (8000)
#   --listen ADDRESS        address to listen on (default: --address)
#   --ticket-secret FILE    file with the cluster's ticket secret, for retries of signed tickets
#   --metaserver-token FILE file with the bearer token that decode engines must send with tickets
#   --tls-cert FILE, --tls-key FILE
#                           PEM files with the certificate chain and its key; enables HTTPS for clients and tickets;
#                           decode engines then need `tls_config` and an https:// --metaserver
#   --tls-key-password FILE file with the key's password, mode 0600
#   --metaserver-port PORT  separate port for tickets, with the certificate of --tls-cert unless there is another
#   --metaserver-tls-cert FILE, --metaserver-tls-key FILE, --metaserver-tls-key-password FILE
#                           certificate for --metaserver-port
#   --metaserver-client-ca FILE
#                           CA for mutual TLS on --metaserver-port: only decode engines with a certificate from it
#                           may post tickets
#   --dry-run               print the command as a shell script, and start nothing
#   -- ARGUMENT...          all further arguments go to `vllm-ascend-pd proxy` (see its --help)
#
# PYTHON (default: $VENV/bin/python, else python3) is the Python with vllm-ascend-pd. Exits with 2 and a reason if
# options contradict each other.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"

device=cpu # no CANN here
env_file=
address='' listen='' port=8000 ticket_secret='' token=''
tls_cert='' tls_key='' tls_password=''
metaserver_port='' metaserver_cert='' metaserver_key='' metaserver_password='' metaserver_client_ca=''
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
      value=${2-}
      case $1 in
        --prefill) prefill+=("$value") ;;
        --decode) decode+=("$value") ;;
        --address) address=$value ;;
        --listen) listen=$value ;;
        --port) port=$value ;;
        --ticket-secret) ticket_secret=$value ;;
        --metaserver-token) token=$value ;;
        --tls-cert) tls_cert=$value ;;
        --tls-key) tls_key=$value ;;
        --tls-key-password) tls_password=$value ;;
        --metaserver-port) metaserver_port=$value ;;
        --metaserver-tls-cert) metaserver_cert=$value ;;
        --metaserver-tls-key) metaserver_key=$value ;;
        --metaserver-tls-key-password) metaserver_password=$value ;;
        --metaserver-client-ca) metaserver_client_ca=$value ;;
        *) die "unknown option $1; see --help" ;;
      esac
      (($# > 1)) || die "$1 needs a value; see --help"
      shift
      ;;
    *) die "unknown argument $1: arguments for the proxy go after --; see --help" ;;
  esac
  shift
done

from_elsewhere=
for word in "${rest[@]}"; do
  case $word in
    --engines-file | --engines-file=* | --admin-token-file | --admin-token-file=*) from_elsewhere=1 ;;
  esac
done
[[ $from_elsewhere ]] || ((${#prefill[@]})) || die "--prefill is missing: at least one prefill engine's URL"
[[ $from_elsewhere ]] || ((${#decode[@]})) || die "--decode is missing: at least one decode engine's URL"
[[ $address ]] || die "--address is missing: decode engines need it to reach this proxy"
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] || die "--port $port: must be from 1 to 65535"
if [[ $metaserver_port ]]; then
  [[ $metaserver_port =~ ^[1-9][0-9]{0,4}$ ]] || die "--metaserver-port $metaserver_port: must be from 1 to 65535"
  ((metaserver_port != port)) || die "--metaserver-port $port is the same as --port: omit it, or choose another port"
elif [[ $metaserver_cert$metaserver_key$metaserver_password$metaserver_client_ca ]]; then
  die "--metaserver-tls-* and --metaserver-client-ca need --metaserver-port: --port serves clients"
fi
check_pair() { # NAME CERT KEY PASSWORD
  [[ ${2:+given} == "${3:+given}" ]] || die "$1-cert and $1-key need each other"
  [[ $2 || ! $4 ]] || die "$1-key-password needs $1-cert and $1-key"
}
check_pair --tls "$tls_cert" "$tls_key" "$tls_password"
check_pair --metaserver-tls "$metaserver_cert" "$metaserver_key" "$metaserver_password"
[[ $tls_cert || $metaserver_cert || ! $metaserver_client_ca ]] ||
  die "--metaserver-client-ca needs a certificate: --metaserver-tls-cert or --tls-cert"
case $address in
  0.0.0.0 | ::) die "--address $address is not an address that decode engines can reach; use --listen $address to listen on all addresses" ;;
esac
for url in "${prefill[@]}" "${decode[@]}"; do
  [[ $url =~ ^(https?://[^/[:space:]@?#]+|dns\+http://[^/[:space:]@?#]+:[0-9]+)/?$ ]] ||
    die "$url: must be an engine's URL, such as http://10.0.0.11:8100 or dns+http://NAME:8100"
done
for url in "${prefill[@]}"; do
  for other in "${decode[@]}"; do
    [[ ${url%/} != "${other%/}" ]] || die "$url is both a prefill and a decode engine"
  done
done

find_python
check_python
refused=$("$python" -m vllm_ascend_pd.tools.launch.arguments "${rest[@]}") || exit
[[ ! $refused ]] || die "$refused"
host=$address
[[ $host == *:* ]] && host="[$host]"
scheme=http # of the port that takes tickets: --tls-cert is for both ports, --metaserver-tls-cert for that one
[[ ! $tls_cert$metaserver_cert ]] || scheme=https
command=("$(sibling vllm-ascend-pd)" proxy --host "${listen:-$address}" --port "$port"
  --metaserver-url "$scheme://$host:${metaserver_port:-$port}/v1/metaserver")
for url in "${prefill[@]}"; do command+=(--prefill "$url"); done
for url in "${decode[@]}"; do command+=(--decode "$url"); done
add() { # OPTION VALUE
  [[ ! $2 ]] || command+=("$1" "$2")
}
add --ticket-secret-file "$ticket_secret"
add --metaserver-token-file "$token"
add --tls-cert "$tls_cert"
add --tls-key "$tls_key"
add --tls-key-password-file "$tls_password"
add --metaserver-port "$metaserver_port"
add --metaserver-tls-cert "$metaserver_cert"
add --metaserver-tls-key "$metaserver_key"
add --metaserver-tls-key-password-file "$metaserver_password"
add --metaserver-client-ca "$metaserver_client_ca"
run "${command[@]}" "${rest[@]}"
