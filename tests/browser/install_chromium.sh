#!/bin/sh
# The tests of pages run in Chromium. Where none is found, root gets Debian's; nobody else's system is changed.
set -u
CURE="install it (Debian: apt-get install chromium), or set CHROMIUM to the path of one"

fail() {
  # The tests fail and say so too; the others run all the same.
  echo "no Chromium found, and $1; tests/browser will fail: $CURE" >&2
  exit 0
}

for name in "${CHROMIUM:-chromium}" chromium chromium-browser google-chrome google-chrome-stable chrome \
  chromium-headless-shell; do
  if command -v "$name" > /dev/null 2>&1; then exit 0; fi
done
command -v apt-get > /dev/null 2>&1 || fail "there is no apt-get to install one with"
[ "$(id -u)" = 0 ] || fail "only root may install one"

echo "installing Chromium for the tests of pages"
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# Each answer within a minute, three tries, and limits for all of it: a slow mirror must not hold up the other tests.
apt() {
  # shellcheck disable=SC2086
  timeout --kill-after=30 "$1" apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 \
    -o Acquire::http::Timeout=60 -o Acquire::https::Timeout=60 "$2" $3 >> "$log" 2>&1 < /dev/null
}
install() {
  apt 600 install "-y --no-install-recommends chromium"
}
# One broken source among several makes update fail; what the others offer may do.
apt 300 update ""
# What was once cut off while it unpacked is put in order first.
if install || { dpkg --configure -a >> "$log" 2>&1 < /dev/null && install; }; then exit 0; fi
tail -n 20 "$log" >&2
fail "apt-get could not install one"
