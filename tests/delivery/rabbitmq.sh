#!/usr/bin/env bash
# RabbitMQ for the tests, on Debian and Ubuntu:
#
#   tests/delivery/rabbitmq.sh install        install it with apt-get, as root; the machine's service is not started
#   tests/delivery/rabbitmq.sh check          say what is missing, if anything is
#
# The tests start nodes of their own, which they kill and start again (tests/harness/rabbitmq.py).
set -euo pipefail

server=/usr/lib/rabbitmq/bin/rabbitmq-server

check() {
    [ -x "$server" ] && command -v epmd >/dev/null && return
    echo "RabbitMQ is not installed: there is no $server, or no epmd. As root, on Debian or Ubuntu:" >&2
    echo "    tests/delivery/rabbitmq.sh install" >&2
    exit 1
}

install_server() {
    if [ -x "$server" ] && command -v epmd >/dev/null; then return; fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "To install rabbitmq-server takes root: sudo tests/delivery/rabbitmq.sh install" >&2
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
    apt-get install -y -qq --no-install-recommends rabbitmq-server
    check
}

case ${1:-} in
    install) install_server ;;
    check) check ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
