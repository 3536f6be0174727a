#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts the proxy in front of prefill and decode engines. It needs no NPU.
#
#   scripts/launch_proxy.sh --prefill URL... --decode URL... --address IP [OPTION...] [-- PROXY_ARGUMENT...]
#
#   --prefill URL, --decode URL
#                           engines, such as http://10.0.0.11:8100, or dns+http://NAME:PORT for all addresses of a name;
#                           may be repeated, or left out with -- --engines-file FILE or -- --admin-token-file FILE
#   --address HOST          this host's address: where decode engines find the proxy, to post their tickets
#   --port PORT             where it serves clients and takes tickets (8000)
#   --listen ADDRESS        on which address (default: --address)
#   --ticket-secret FILE    the cluster's, to try tickets of signing engines again
#   --metaserver-token FILE a bearer token without which it takes no ticket
#   --tls-cert FILE, --tls-key FILE
#                           HTTPS: PEM files with the port's certificate (chain) and its key, for clients, and for
#                           tickets too; decode engines need `tls_config` then, and an https:// --metaserver
#   --tls-key-password FILE with the key's password, of mode 0600
#   --metaserver-port PORT  takes tickets here, and not on --port; with --tls-cert behind the same certificate
#   --metaserver-tls-cert FILE, --metaserver-tls-key FILE, --metaserver-tls-key-password FILE
#                           another certificate for --metaserver-port
#   --metaserver-client-ca FILE
#                           mutual TLS on --metaserver-port: only decode engines with a certificate of this authority
#                           may post tickets
#   --dry-run               print the command as a shell script, and start nothing
#   -- ARGUMENT...          everything after it goes to `vllm-ascend-pd proxy` (its --help)
#
# PYTHON (default: $VENV/bin/python, else python3) is the Python with vllm-ascend-pd in it. Exits with 2 and a reason
# for options that make no sense together.
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
    *) die "what is $1? arguments for the proxy go behind --; see --help" ;;
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
[[ $address ]] || die "--address is missing: how do decode engines reach this proxy?"
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] || die "--port $port: 1 to 65535"
if [[ $metaserver_port ]]; then
  [[ $metaserver_port =~ ^[1-9][0-9]{0,4}$ ]] || die "--metaserver-port $metaserver_port: 1 to 65535"
  ((metaserver_port != port)) || die "--metaserver-port $port is --port: leave it out, or take another"
elif [[ $metaserver_cert$metaserver_key$metaserver_password$metaserver_client_ca ]]; then
  die "--metaserver-tls-* and --metaserver-client-ca need --metaserver-port: on --port clients are served"
fi
check_pair() { # NAME CERT KEY PASSWORD
  [[ ${2:+given} == "${3:+given}" ]] || die "$1-cert and $1-key go together"
  [[ $2 || ! $4 ]] || die "$1-key-password needs $1-cert and $1-key"
}
check_pair --tls "$tls_cert" "$tls_key" "$tls_password"
check_pair --metaserver-tls "$metaserver_cert" "$metaserver_key" "$metaserver_password"
[[ $tls_cert || $metaserver_cert || ! $metaserver_client_ca ]] ||
  die "--metaserver-client-ca needs a certificate: --metaserver-tls-cert or --tls-cert"
case $address in
  0.0.0.0 | ::) die "--address $address is no address that decode engines can reach; --listen $address listens on all" ;;
esac
for url in "${prefill[@]}" "${decode[@]}"; do
  [[ $url =~ ^(https?://[^/[:space:]@?#]+|dns\+http://[^/[:space:]@?#]+:[0-9]+)/?$ ]] ||
    die "$url: an engine's URL is such as http://10.0.0.11:8100 or dns+http://NAME:8100"
done
for url in "${prefill[@]}"; do
  for other in "${decode[@]}"; do
    [[ ${url%/} != "${other%/}" ]] || die "$url is given as a prefill and as a decode engine"
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
