#!/bin/sh
# Runs the training as a Kubernetes Job: starts it, shows its log, and exits with its result. If a signal ends this script, it
# removes the Job. kubectl's context determines cluster and namespace.
set -eu
manifest=@manifest@
job=@name@
first=@instance@=@name@,@index@=0

# Delete the Job after its pods, so that the next one cannot start beside them, follow their log and share their checkpoints.
remove() { kubectl delete --cascade=foreground --ignore-not-found --filename "$manifest" "$@"; }

# Follow the log in the background, because a shell handles signals only between commands and in `wait`.
log=
trap 'trap "" TERM INT HUP; [ -z "$log" ] || kill "$log" 2>/dev/null || true; remove --wait=false; exit 143' TERM INT HUP
lines=-1
follow() {
    kubectl logs --follow --tail="$lines" --selector "$first" | show &
    log=$!
    if wait "$log"; then lines=0; fi # when following again, do not repeat the log
    log=
}
show() { IFS= read -r line && printf '%s\n' "$line" && exec cat; } # fails if there is no line
phase() { kubectl get pods --selector "$first" --output 'jsonpath={.items[*].status.phase}' || true; }
state() {
    conditions='jsonpath=found {.status.conditions[?(@.status=="True")].type} '
    kubectl get job "$job" --ignore-not-found --output "$conditions" || echo "found " # the cluster may answer next time
}

remove # the Job of an earlier attempt; waits until it is gone
kubectl create --filename "$manifest"
while :; do
    case "$(phase)" in
    *Running* | *Succeeded* | *Failed*) follow ;; # until the container or the connection ends
    esac
    case "$(state)" in
    *" Complete "*) exit 0 ;;
    *" Failed "*)
        echo "the Job $job failed: kubectl describe job $job" >&2
        exit 1
        ;;
    found*) sleep 2 ;;
    *)
        echo "the Job $job was removed by someone else" >&2
        exit 1
        ;;
    esac
done
