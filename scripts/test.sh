#!/usr/bin/env bash
# Lint, types and tests on the CPU, in under ten minutes on two idle cores. --all also runs what is
# marked slow; --lab adds types and tests of scripts/lab; --fast runs lint and unit tests only, in
# about two minutes. Other arguments go to pytest: files, -k, -x; -n 0 runs all tests in one process.
set -euo pipefail
source "$(dirname "$0")/env.sh"
chosen="not gpu and not slow" fast='' lab='' rest=()
processes=3 # of which two compute while one waits for ranks or a compiler
for argument; do
  case $argument in
    --all) chosen="not gpu" ;;
    --fast) # end_to_end has no unit tests, and these wait for nothing
      chosen="unit" fast=1 processes=2 rest+=(--ignore tests/end_to_end) ;;
    --lab) lab=1 ;;
    tests/lab*) lab=1 rest+=("$argument") ;;
    *) rest+=("$argument") ;;
  esac
done
checked=(phalanx)
if [ -n "$lab" ]; then # named one by one, as pyproject.toml excludes their folder
  mapfile -t -O 1 checked < <(find phalanx/scripts/lab/ -name '*.py')
else
  rest+=(--ignore tests/lab)
fi
"$bin/ruff" check .
"$bin/ruff" format --check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
mypy='' code=0
if [ -z "$fast" ]; then
  "$bin/mypy" --cache-dir "${XDG_CACHE_HOME:-$HOME/.cache}/phalanx/mypy" "${checked[@]}" \
    >"$types" 2>&1 &
  mypy=$!
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run() { # of no tests at all, as of given files, pytest says 5
  "$bin/python" -m pytest -n $processes --dist loadfile --no-loadscope-reorder --durations 20 "$@" ||
    { local status=$?; [ $status = 5 ] || code=$status; }
}
# The core does without extras/: an import hook refuses them to its tests.
PYTHONPATH="$PWD/tests/support/walls${PYTHONPATH:+:$PYTHONPATH}" \
  run -m "($chosen) and not extras" --ignore tests/extras "${rest[@]}"
run -m "($chosen) and extras" "${rest[@]}"
if [ -n "$mypy" ]; then
  wait "$mypy" || code=$((code ? code : 1))
fi
cat "$types"
exit "$code"
