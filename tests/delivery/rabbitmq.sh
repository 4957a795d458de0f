#!/usr/bin/env bash
# RabbitMQ for the tests, on Debian and Ubuntu:
#
#   tests/delivery/rabbitmq.sh install        install it with apt-get, as root; the machine's service is not started
#   tests/delivery/rabbitmq.sh check          say what is missing, if anything is
#   tests/delivery/rabbitmq.sh start [DIR]    run a node of one's own, and say its URL
#   tests/delivery/rabbitmq.sh stop [DIR]     stop it, and delete it with all that it keeps
#
# The tests need no more than the first: they start nodes of their own, which they kill and start again. A node listens
# on the loopback only, on RABBITMQ_PORT (5679) and the two ports above it; DIR is where it keeps everything.
set -euo pipefail

server=/usr/lib/rabbitmq/bin/rabbitmq-server
port=${RABBITMQ_PORT:-5679}
directory=${2:-${TMPDIR:-/tmp}/rabbitmq-of-the-tests}

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

start() {
    check
    if [ -e "$directory" ]; then
        echo "$directory is there already. Stop the node that it belongs to, or give another directory." >&2
        exit 1
    fi
    mkdir -p "$directory/log" "$directory/data"
    echo '[].' >"$directory/plugins"
    export HOME=$directory # its cookie
    export ERL_CRASH_DUMP=$directory/erl_crash.dump
    export RABBITMQ_NODENAME="tests$port@localhost" RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 RABBITMQ_NODE_PORT=$port
    export RABBITMQ_DIST_PORT=$((port + 1)) ERL_EPMD_PORT=$((port + 2)) ERL_EPMD_ADDRESS=127.0.0.1
    export RABBITMQ_MNESIA_BASE=$directory/data RABBITMQ_LOG_BASE=$directory/log
    export RABBITMQ_PID_FILE=$directory/node.pid RABBITMQ_ENABLED_PLUGINS_FILE=$directory/plugins
    export RABBITMQ_CONF_ENV_FILE=$directory/none RABBITMQ_CONFIG_FILE=$directory/none
    export RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none'
    # Started here, because the node would start one that nobody knows the process id of.
    setsid epmd -port "$ERL_EPMD_PORT" -address 127.0.0.1 </dev/null >"$directory/epmd.log" 2>&1 &
    echo $! >"$directory/epmd.pid"
    setsid "$server" </dev/null >"$directory/server.log" 2>&1 &
    echo $! >"$directory/server.pid"
    for _ in $(seq 600); do
        if grep -q 'Starting broker... completed' "$directory/server.log"; then
            echo "amqp://guest:guest@127.0.0.1:$port//"
            return
        fi
        kill -0 "$(cat "$directory/server.pid")" 2>/dev/null || break
        sleep 0.1
    done
    cat "$directory/server.log" >&2
    stop
    exit 1
}

stop() {
    local name pid
    for name in server epmd; do
        [ -e "$directory/$name.pid" ] || continue
        pid=$(cat "$directory/$name.pid")
        kill -TERM -- "-$pid" 2>/dev/null || true # each leads a group of its own
        for _ in $(seq 100); do
            kill -0 -- "-$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
    if [ -e "$directory/server.pid" ]; then rm -rf "$directory"; fi
}

case ${1:-} in
    install) install_server ;;
    check) check ;;
    start) start ;;
    stop) stop ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
