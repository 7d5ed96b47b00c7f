#!/bin/sh
# The tests of pages run in Chromium. Where none is found, root gets Debian's; nobody else's system is changed.
set -u
for name in "${CHROMIUM:-chromium}" chromium chromium-browser google-chrome google-chrome-stable chrome \
  chromium-headless-shell; do
  if command -v "$name" > /dev/null 2>&1; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null 2>&1; then
  echo "installing Chromium for the tests of pages"
  export DEBIAN_FRONTEND=noninteractive
  options="-q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3"
  # shellcheck disable=SC2086
  if apt-get $options update > /dev/null &&
    apt-get $options install -y --no-install-recommends chromium > /dev/null; then
    exit 0
  fi
fi
# The tests fail and say so too; the others run all the same.
echo "no Chromium found and none installed: tests/browser will fail. Install it (Debian: apt-get install chromium)" \
  "or set CHROMIUM to the path of one" >&2
