#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command in a clone of this repository's last commit, in a fresh Debian 12 with little more than Python and a
# compiler. As root, with mmdebstrap installed:
#
#   scripts/fresh_machine.sh root|user COMMAND...
#
#   scripts/fresh_machine.sh user scripts/run_1p1d.sh
#
# The command runs as root or as an ordinary user, without a terminal. The machine's processes and network are this one's.
#
#   SHARED='PATH ...'  files and folders of this machine that are there, too, such as pip's configuration
#   TMPDIR=FOLDER      has the fresh machine while the command runs (default: /tmp). It takes about 6 GB
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
if (($# < 2)) || [[ $1 != root && $1 != user ]]; then
  sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"
  exit 2
fi
user=$1
shift

machine=$(mktemp -d "${TMPDIR:-/tmp}/fresh-debian.XXXXXX")
trap 'rm -rf --one-file-system "$machine"' EXIT
mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,python3-dev,g++,git,ca-certificates \
  bookworm "$machine"
cp /etc/resolv.conf /etc/hosts "$machine/etc/"
[[ $user == root ]] || chroot "$machine" useradd --create-home "$user"
git clone --quiet --no-hardlinks "$root" "$machine/srv/repository"
chroot "$machine" chown -R "$user:" /srv/repository

# The mounts are in a namespace of their own, so they are gone before the folder is.
# shellcheck disable=SC2016
unshare --mount bash -euo pipefail -c '
machine=$1 user=$2
shift 2
mount --make-rprivate /
for path in /dev /proc /sys ${SHARED:-}; do
  [[ -d $path ]] && mkdir -p "$machine$path" || { mkdir -p "$machine${path%/*}" && touch "$machine$path"; }
  mount --rbind "$path" "$machine$path"
done
exec chroot "$machine" su "$user" -c "cd /srv/repository && exec $*"
' fresh_machine "$machine" "$user" "$@" </dev/null
