#!/bin/bash
# Run one task of studies/samples.toml on this machine, and pack what the results page needs, without weights.
#   tools/grid.sh TASK OUT [options of `rotopath study run`]
# TASK is mitosis, nuclei or tumor; its data is in data/sample-TASK. Files in OUT: TASK.tar.gz with the small files of
# all runs, and TASK-figures.tar.* with the rotated predictions, for figures, of the runs on all data. Unpacked on any
# machine (cat TASK-figures.tar.* | tar x), `rotopath study report runs/samples` reads them. The trainings stop after
# LIMIT_S seconds (480), and AT_ONCE of them (14) run at once; the same command resumes them. One run is trained again;
# tools/again.py compares it with the first one, and tools/pages.py writes the pages.
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
cell=$(cd "runs/samples/$task" && ls -d N*-seed0 | sort -V | grep "${CELL:-^N8-}" | head -1)
if [ -n "$cell" ] && [ -f "runs/samples/$task/$cell/evaluation-test.json" ] && [ ! -d "$again" ]; then
    mkdir -p "$again"
    cp "runs/samples/$task/$cell.toml" "$again/"
    rotopath train "$again/$cell.toml" --out "$again/$cell" >/dev/null
    rotopath evaluate "$again/$cell" --robustness >/dev/null
    for file in metrics.json evaluation-test.json weights.safetensors; do
        cmp "runs/samples/$task/$cell/$file" "$again/$cell/$file" && echo "$task: $cell again gives the same $file"
    done
    echo "$task: one cell again after $((SECONDS - begin)) s"
fi

mkdir -p "$out"
folders=("${parts[@]/#/runs/samples/}")
[ -d "$again" ] && folders+=("$again")
tar czf "$out/$task.tar.gz" --exclude=weights.safetensors --exclude=kept.safetensors --exclude='*.npz' \
    --exclude='*.ckpt' --exclude=tensorboard --exclude='.*' "${folders[@]}"
largest=$(ls runs/samples/"$task" | sed -nE 's/.*-(regime[^-]*)-seed0$/\1/p' | sort -V | tail -1)
ls runs/samples/"$task"*/N*-"$largest"-seed*/evaluation-test.npz | tar cf - -T - |
    split -b 15m - "$out/$task-figures.tar."
ls -la "$out"
echo "$task: all after $((SECONDS - begin)) s"
