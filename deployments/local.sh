#!/bin/sh
# Start or stop a Prefect server, its workers and a Dask cluster: `make up` and `make down`.
# Logs and process ids are kept in RUN. Everything listens only on 127.0.0.1.
set -eu

BIN=${BIN:-.venv/bin}
RUN=${RUN:-output/run}
PORT=${PREFECT_PORT:-4200}
DASK_PORT=${DASK_PORT:-8786}
DASHBOARD_PORT=${DASHBOARD_PORT:-8787}
export PREFECT_API_URL="http://127.0.0.1:$PORT/api"
export PREFECT_SERVER_API_PORT="$PORT" # with only the option --port, the UI would call another port
export DASK_LOGGING__DISTRIBUTED=warning

start() { # NAME COMMAND…: in a new session, unless it is already running
    name=$1
    shift
    if running "$name"; then
        return
    fi
    setsid nohup "$@" >"$RUN/$name.log" 2>&1 </dev/null &
    echo $! >"$RUN/$name.pid"
}

current() { # NAME COMMAND…: start it, and stop one first that was started with other code
    if [ "$(cat "$RUN/$1.code" 2>/dev/null)" != "$CODE" ]; then
        stop "$1"
    fi
    start "$@"
    echo "$CODE" >"$RUN/$1.code"
}

stop() { # NAME
    if running "$1"; then
        pid=$(cat "$RUN/$1.pid")
        tries=0
        while kill -s 0 -- "-$pid" 2>/dev/null && [ $tries -lt 60 ]; do
            # To the whole session, as workers have children; repeatedly, as a Prefect worker ends at the second signal.
            [ $((tries % 10)) -ne 0 ] || kill -s TERM -- "-$pid"
            tries=$((tries + 1))
            sleep 0.5
        done
        kill -s KILL -- "-$pid" 2>/dev/null || true
    fi
    rm -f "$RUN/$1.pid" "$RUN/$1.code"
}

running() {
    [ -f "$RUN/$1.pid" ] && kill -0 "$(cat "$RUN/$1.pid")" 2>/dev/null
}

wait_for() { # NAME COMMAND…: until the command succeeds, for up to two minutes
    name=$1
    shift
    tries=0
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [ $tries -gt 240 ] || ! running "$name"; then
            echo "$name did not start; the end of $RUN/$name.log:" >&2
            tail -20 "$RUN/$name.log" >&2
            exit 1
        fi
        sleep 0.5
    done
}

up() {
    mkdir -p "$RUN"
    # The code and the libraries' versions, which name folders.
    CODE="$("$BIN/python" -P -m tokenmill.tasks.shards.code) $(ls "$BIN"/../lib/python*/site-packages | cksum)"
    start server "$BIN/prefect" server start --host 127.0.0.1
    wait_for server "$BIN/python" -c "import urllib.request; urllib.request.urlopen('$PREFECT_API_URL/health', timeout=2)"
    start scheduler "$BIN/dask" scheduler --host 127.0.0.1 --port "$DASK_PORT" --dashboard-address "127.0.0.1:$DASHBOARD_PORT"
    # Only commands need Prefect's plugins, and plugins cannot start where workers import Prefect.
    current workers env PREFECT_PLUGINS_ENABLED=false "$BIN/dask" worker "tcp://127.0.0.1:$DASK_PORT" --host 127.0.0.1 --nworkers "${WORKERS:-auto}" \
        --nthreads 1 --dashboard-address 127.0.0.1:0
    if ! "$BIN/tokenmill" deploy >"$RUN/deploy.log" 2>&1; then
        cat "$RUN/deploy.log" >&2
        exit 1
    fi
    current worker "$BIN/prefect" worker start --pool tokenmill
    current gpu-worker "$BIN/prefect" worker start --pool gpu --limit 1
    cat <<END

run:      PREFECT_API_URL=$PREFECT_API_URL $BIN/prefect deployment run pretrain-data-prep
on Dask:  … -p cluster=tcp://127.0.0.1:$DASK_PORT
logs:     $RUN/*.log, $RUN/deploy.log: what is deployed, and the schedule that is off
stop:     make down
from elsewhere: ssh -L $PORT:127.0.0.1:$PORT -L $DASHBOARD_PORT:127.0.0.1:$DASHBOARD_PORT $(hostname)
Prefect:  http://127.0.0.1:$PORT
Dask:     http://127.0.0.1:$DASHBOARD_PORT/info/main/workers.html
reports:  http://127.0.0.1:$PORT/artifacts
END
}

down() {
    for name in gpu-worker worker workers scheduler server; do
        stop $name
    done
}

case ${1:-} in
up | down) "$1" ;;
*)
    echo "usage: $0 up|down" >&2
    exit 2
    ;;
esac
