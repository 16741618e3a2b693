#!/bin/sh
# The container engine for tests: a running engine, else a private one if allowed.
#   container_engine.sh start   print its environment for eval; may start a private engine
#   container_engine.sh base    create the images' base image on a private engine
#   container_engine.sh stop    stop the private engine and restore the machine's state
#
# A private engine needs PRIVATE_ENGINE=1, root, Debian, and a machine without another dockerd or
# docker0. Its packages of Debian's next release are unpacked, not installed; only missing runc,
# iptables and debootstrap are installed. All files are in ENGINE_FOLDER, by default in the cache.
# Exit code 77: no engine; the message names the reason.
set -eu
cd "$(dirname "$0")/.."
BASE_IMAGE=python:3.11-slim-bookworm
FOLDER=${ENGINE_FOLDER:-${TIDESERVE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/tideserve}/engine}
PACKAGES="docker.io docker-cli docker-compose docker-buildx containerd"
PID=$FOLDER/run/docker.pid

say() { echo "container engine: $*" >&2; }

no_engine() {
    say "$*"
    exit 77
}

environment() {
    echo "export DOCKER_HOST=unix://$FOLDER/run/docker.sock DOCKER_CONFIG=$FOLDER/conf" \
        "PATH=$FOLDER/unpacked/usr/sbin:$FOLDER/unpacked/usr/bin:$PATH PRIVATE_ENGINE_FOLDER=$FOLDER"
}

# A zombie, which only its parent can reap, does not count as running.
runs() { [ -e "/proc/$1/exe" ]; }

ours_runs() { [ -s "$PID" ] && runs "$(cat "$PID")"; }

dockerd_runs() { readlink /proc/[0-9]*/exe 2>/dev/null | grep -q '/dockerd$'; }

ended() { ! runs "$1"; }

wait_until() { # SECONDS COMMAND...
    tries=$(($1 * 2))
    shift
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.5
    done
}

may_be_private() {
    remedy="start Docker, or allow a private engine with PRIVATE_ENGINE=1 as root on Debian"
    [ "${PRIVATE_ENGINE:-}" = 1 ] || no_engine "no container engine answers; $remedy"
    [ "$(id -u)" = 0 ] || no_engine "a private engine needs root; $remedy"
    command -v apt-get >/dev/null || no_engine "a private engine needs apt-get; $remedy"
    if dockerd_runs || [ -e /sys/class/net/docker0 ]; then
        no_engine "another dockerd or its bridge docker0 is here; use that engine, or end it"
    fi
}

fetch() {
    [ ! -x "$FOLDER/unpacked/usr/sbin/dockerd" ] || return 0
    sources=/etc/apt/sources.list.d/debian.sources
    [ -s "$sources" ] || no_engine "apt has no $sources to find Debian's next release by"
    mkdir -p "$FOLDER/apt/sources" "$FOLDER/apt/lists/partial" "$FOLDER/apt/cache/archives/partial" \
        "$FOLDER/packages" "$FOLDER/unpacked" "$FOLDER/conf/cli-plugins"
    sed -e '/^$/q' -e 's/^Suites:.*/Suites: trixie/' "$sources" >"$FOLDER/apt/sources/next.sources"
    apt="apt-get -qq -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=$FOLDER/apt/sources
        -o Dir::Etc::PreferencesParts=/dev/null -o Dir::State::Lists=$FOLDER/apt/lists
        -o Dir::Cache=$FOLDER/apt/cache -o APT::Sandbox::User=root"
    # shellcheck disable=SC2086
    (cd "$FOLDER/packages" && timeout 120 $apt update >&2 && timeout 300 $apt download $PACKAGES >&2) ||
        no_engine "apt cannot fetch the packages of an engine; check that it reaches its mirror"
    for package in "$FOLDER"/packages/*.deb; do dpkg -x "$package" "$FOLDER/unpacked"; done
    ln -sf "$FOLDER"/unpacked/usr/libexec/docker/cli-plugins/* "$FOLDER/conf/cli-plugins/"
}

install_tools() {
    missing=""
    for tool in runc iptables debootstrap; do
        command -v "$tool" >/dev/null || missing="$missing $tool"
    done
    [ -n "$missing" ] || return 0
    # shellcheck disable=SC2086
    { timeout 120 apt-get -qq update && DEBIAN_FRONTEND=noninteractive timeout 300 \
        apt-get -qq install -y --no-install-recommends $missing; } >"$FOLDER/apt.log" 2>&1 ||
        no_engine "apt cannot install$missing; see $FOLDER/apt.log"
}

SWITCHES="net/ipv4/ip_forward net/ipv6/conf/all/forwarding net/ipv6/conf/default/forwarding
    net/bridge/bridge-nf-call-iptables net/bridge/bridge-nf-call-ip6tables"

save_network() {
    mkdir -p "$FOLDER/before"
    for command in iptables ip6tables; do
        $command-save >"$FOLDER/before/$command" 2>/dev/null || true
    done
    ls /sys/class/net >"$FOLDER/before/interfaces"
    for switch in $SWITCHES; do
        [ ! -e "/proc/sys/$switch" ] || echo "$switch $(cat "/proc/sys/$switch")"
    done >"$FOLDER/before/switches"
}

# New interfaces, rules and switches. Tables that did not exist before are flushed.
restore_network() {
    [ -s "$FOLDER/before/interfaces" ] || return 0
    for interface in /sys/class/net/*; do
        name=${interface##*/}
        grep -qxF "$name" "$FOLDER/before/interfaces" || case $name in
            docker* | br-* | veth*) ip link delete "$name" 2>/dev/null || true ;;
        esac
    done
    for command in iptables ip6tables; do
        for table in $($command-save 2>/dev/null | sed -n 's/^\*//p'); do
            grep -qx "\*$table" "$FOLDER/before/$command" && continue
            $command -t "$table" -F && $command -t "$table" -X
            for chain in $($command-save -t "$table" | sed -n 's/^:\([A-Z]*\) DROP.*/\1/p'); do
                $command -t "$table" -P "$chain" ACCEPT
            done
        done
        [ ! -s "$FOLDER/before/$command" ] || $command-restore <"$FOLDER/before/$command"
    done
    while read -r switch value; do
        [ "$(cat "/proc/sys/$switch")" = "$value" ] || echo "$value" >"/proc/sys/$switch"
    done <"$FOLDER/before/switches"
    rm -r "$FOLDER/before"
}

start() {
    if [ -z "${ENGINE_FOLDER:-}" ] && timeout 20 docker info >/dev/null 2>&1; then
        docker compose version >/dev/null 2>&1 ||
            no_engine "this Docker has no compose plugin; install it (docker-compose-plugin)"
        return 0
    fi
    fresh=
    if ! ours_runs; then
        fresh=1
        may_be_private
        mkdir -p "$FOLDER"
        fetch
        install_tools
        # Clean up after an interrupted start first.
        restore_network
        mkdir -p "$FOLDER/run"
        rm -f "$PID" "$FOLDER/run/docker.sock"
        save_network
        eval "$(environment)"
        setsid dockerd --host "$DOCKER_HOST" --data-root "$FOLDER/data" \
            --exec-root "$FOLDER/run/exec" --pidfile "$PID" --storage-driver overlay2 \
            --exec-opt native.cgroupdriver=cgroupfs </dev/null >"$FOLDER/dockerd.log" 2>&1 &
    fi
    eval "$(environment)"
    if ! wait_until 60 docker info; then
        tail -3 "$FOLDER/dockerd.log" >&2
        stop
        no_engine "the private engine does not start; see $FOLDER/dockerd.log"
    fi
    [ -z "$fresh" ] || clear_out >&2
    environment
}

# Containers of a killed test would restart with the engine, which runs only tests' containers.
clear_out() {
    left=$(docker ps --all --quiet)
    # shellcheck disable=SC2086
    [ -z "$left" ] || docker rm --force --volumes $left
    docker network prune --force
    docker volume prune --all --force
}

# Without a registry: the same system from Debian's packages, tagged with the name that builds use.
base() {
    eval "$(environment)"
    ours_runs || return 0
    ! docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 || return 0
    archive=$FOLDER/base.tar
    if [ ! -s "$archive" ]; then
        mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources | head -1)
        rm -rf "$FOLDER/base"
        timeout 400 debootstrap --variant=minbase \
            --include=python3-minimal,python3-venv,python3-distutils,ca-certificates \
            bookworm "$FOLDER/base" "$mirror" >"$FOLDER/debootstrap.log" 2>&1 ||
            no_engine "the base image cannot be made; see $FOLDER/debootstrap.log"
        rm -rf "$FOLDER"/base/var/cache/apt/archives/*.deb "$FOLDER"/base/var/lib/apt/lists/*
        tar -C "$FOLDER/base" -cf "$archive.unfinished" .
        mv "$archive.unfinished" "$archive"
        rm -rf "$FOLDER/base"
    fi
    timeout 120 docker import -c 'CMD ["python3"]' "$archive" "$BASE_IMAGE" >/dev/null
}

stop() {
    if ours_runs; then
        number=$(cat "$PID")
        kill "$number"
        if ! wait_until 60 ended "$number"; then
            say "the private engine does not end and is killed"
            kill -9 "$number" || true
            [ ! -s "$FOLDER/run/exec/containerd/containerd.pid" ] ||
                kill -9 "$(cat "$FOLDER/run/exec/containerd/containerd.pid")" 2>/dev/null || true
        fi
    fi
    rm -f "$PID"
    awk -v folder="$FOLDER/" 'index($2, folder) == 1 { print $2 }' /proc/mounts | sort -r |
        while read -r mount; do umount -l "$mount" || true; done
    restore_network
}

case ${1:-} in
    start | base | stop) "$1" ;;
    *) say "usage: container_engine.sh start|base|stop"; exit 2 ;;
esac
