#!/usr/bin/env bash
# Servers for the tests that no package index has, on Debian and Ubuntu:
#
#   tests/servers.sh install rabbitmq|mariadb|promtool   install one with apt-get, as root; the machine's service is not
#                                                        started
#   tests/servers.sh check rabbitmq|mariadb|promtool     say what is missing, if anything is
#
# The tests start servers of their own, which they kill and start again (tests/harness).
set -euo pipefail

PATH=$PATH:/usr/sbin:/usr/lib/rabbitmq/bin

case ${2:-} in
    rabbitmq) programs=(rabbitmq-server epmd) packages=(rabbitmq-server) ;;
    # With what mysqlclient is compiled with.
    mariadb) programs=(mariadbd mariadb-install-db mariadb_config gcc pkg-config)
             packages=(mariadb-server libmariadb-dev gcc libc6-dev pkg-config) ;;
    promtool) programs=(promtool) packages=(prometheus) ;;  # checks the alert rules
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac

missing() {
    local program
    for program in "${programs[@]}"; do
        command -v "$program" >/dev/null || { echo "$program"; return; }
    done
}

check() {
    if [ -n "$(missing)" ]; then
        echo "There is no $(missing). As root, on Debian or Ubuntu:  tests/servers.sh install $2" >&2
        exit 1
    fi
}

install_server() {
    if [ -z "$(missing)" ]; then return; fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "To install ${packages[*]} takes root: sudo tests/servers.sh install $2" >&2
        exit 1
    fi
    # The package starts its service, unless this file forbids it. One that was there already stays.
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        # Not a local variable: the trap runs when the function has returned.
        made=$policy
        trap 'rm -f "$made"' EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}"
    check "$@"
}

case $1 in
    install) install_server "$@" ;;
    check) check "$@" ;;
    *) exit 2 ;;
esac
