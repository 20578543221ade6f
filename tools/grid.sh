#!/bin/bash
# Run one task of studies/samples.toml on this machine, and pack what the results page needs, without weights.
#   tools/grid.sh TASK OUT [options of `rotopath study run`]
# TASK is mitosis, nuclei or tumor; its data is in data/sample-TASK. Files in OUT: TASK.tar.gz with the small files of
# all runs, TASK-figures.tar with the rotated predictions, for figures, of the runs on all data, and
# samples-report.tar.gz with the report of all runs so far. The runs stop after LIMIT_S seconds; the same command
# resumes them.
set -uo pipefail
task=$1 out=$2
shift 2
rotopath() { "${PYTHON:-python3}" -m rotopath "$@"; }
case $task in
    tumor) parts=(tumor tumor-long tumor-faithful) ;;
    *) parts=("$task" "$task-faithful") ;;
esac
at_once=${AT_ONCE:-14}
export -f rotopath
begin=$SECONDS

timeout --foreground -s INT "${LIMIT_S:-480}" "${PYTHON:-python3}" -m rotopath study run studies/samples.toml \
    "${parts[@]/#/--part=}" --at-once "$at_once" "$@"
echo "$task: study run ended with $? after $((SECONDS - begin)) s"

# The three readings of the 50 % rule, with thresholds chosen by the same rule
if [ "$task" = nuclei ]; then
    for run in runs/samples/nuclei/N*-regime3-seed?/; do
        for rule in area own-area; do
            [ -f "$run/evaluation-test-$rule.json" ] || echo "$run $rule"
        done
    done | OMP_NUM_THREADS=1 xargs -r -P "$at_once" -L 1 bash -c 'rotopath evaluate "$0" --rule "$1" >/dev/null'
    echo "$task: rules after $((SECONDS - begin)) s"
fi

# One cell again: its scores are to be the same
again=runs/samples-again/$task
first=$(cd "runs/samples/$task" && ls -d N8-*-seed0 | sort -V | tail -1)
[ "$task" = tumor ] && first=N8-regime0.1-seed0
if [ -f "runs/samples/$task/$first/evaluation-test.json" ] && [ ! -d "$again" ]; then
    mkdir -p "$again"
    cp "runs/samples/$task/$first.toml" "$again/"
    rotopath train "$again/$first.toml" --out "$again/$first" >/dev/null
    rotopath evaluate "$again/$first" --robustness >/dev/null
    for file in metrics.json evaluation-test.json; do
        cmp "runs/samples/$task/$first/$file" "$again/$first/$file" && echo "$task: $first again gives the same $file"
    done
    cmp "runs/samples/$task/$first/weights.safetensors" "$again/$first/weights.safetensors" && echo "same weights"
    echo "$task: one cell again after $((SECONDS - begin)) s"
fi

mkdir -p "$out"
tar czf "$out/$task.tar.gz" --exclude=weights.safetensors --exclude='*.npz' --exclude='*.ckpt' --exclude=tensorboard \
    --exclude=kept.safetensors --exclude='.*' "${parts[@]/#/runs/samples/}" "$again"
largest=$(ls -d runs/samples/"$task"/N1-*seed0/ | sed -E 's/.*-(regime[^-]*)-.*/\1/' | sort -V | tail -1)
ls runs/samples/"$task"*/N*-"$largest"-seed*/evaluation-test.npz | tar cf "$out/$task-figures.tar" -T -
rotopath study report runs/samples --out "$out/samples-report" &&
    tar czf "$out/samples-report.tar.gz" -C "$out" samples-report && rm -r "$out/samples-report"
ls -la "$out"
echo "$task: all after $((SECONDS - begin)) s"
