#!/usr/bin/env bash
# Runs the fuzz programs of build-fuzz side by side. Inputs that reached something new stay in
# build-fuzz/corpus for the next run, what was found in build-fuzz/NAME-crash-*, the full output in
# build-fuzz/NAME.log. Exit code 1 if anything was found.
# Usage: tools/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../build-fuzz"
seconds=${1:?seconds to run}
export OMP_WAIT_POLICY=passive # more threads than processors

names=(desc layer_text lists rounding)
pids=()
for name in "${names[@]}"; do
  mkdir -p "corpus/$name"
  # Long inputs from the start: the shortest that makes a routing has some fifty bytes.
  bin/fuzz_"$name" -max_total_time="$seconds" -len_control=0 -max_len=1000 -timeout=60 \
    -print_final_stats=1 -artifact_prefix="$name-" "corpus/$name" >"$name.log" 2>&1 &
  pids+=($!)
done

failed=0
for i in "${!names[@]}"; do
  name=${names[i]}
  if wait "${pids[i]}"; then
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$name.log")
    reached=$(sed -n 's/.*DONE *cov: \([0-9]*\).*/\1/p' "$name.log")
    echo "fuzz_$name: $runs inputs in $seconds s, $reached edges reached, nothing found"
  else
    failed=1
    grep -m 1 -A 30 -E 'ERROR: |^broken: |runtime error: ' "$name.log" || tail -n 40 "$name.log"
    echo "fuzz_$name: FOUND something; again: build-fuzz/bin/fuzz_$name build-fuzz/$name-*-*"
  fi
done
exit "$failed"
