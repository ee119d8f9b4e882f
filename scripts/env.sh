# Sourced by train.sh and test.sh: make .venv with the pinned dependencies if it is missing or out of date.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/phalanx.stamp
if [ -n "${PHALANX_PYTHON:-}" ]; then
  bin=$(dirname "$PHALANX_PYTHON")
  for needed in python torchrun; do
    [ -x "$bin/$needed" ] || {
      echo "PHALANX_PYTHON=$PHALANX_PYTHON: there is no $bin/$needed; name the python of an" \
        "environment with the dependencies, or leave the variable unset" >&2
      exit 2; }
  done
else
  if ! cmp -s pyproject.toml "$stamp"; then
    for python in python3.12 python3.13 python3; do
      if "$python" --version >/dev/null 2>&1; then break; fi
    done
    "$python" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' || {
      echo "Phalanx needs Python 3.12 or 3.13 as python3.12, python3.13 or python3 on the PATH" >&2
      exit 2; }
    echo "Installing into .venv (once; a minute)" >&2
    "$python" -m venv .venv
    pip=(.venv/bin/python -m pip --disable-pip-version-check)
    index='' # the one that pip is configured with, which uv does not read
    for level in :env: global install; do
      index=$("${pip[@]}" config get "$level.index-url" 2>/dev/null) && break
    done
    if ! { "${pip[@]}" install --quiet uv && .venv/bin/uv pip install --quiet \
      --python .venv/bin/python ${index:+--index-url "$index"} -e '.[dev]'; }; then
      echo "uv cannot install here; pip takes some minutes" >&2
      "${pip[@]}" install --quiet --no-compile -e '.[dev]'
    fi
    cp pyproject.toml "$stamp"
  fi
  bin=.venv/bin
fi
# The first import of a module compiles it, as the installation does not, for dozens of processes.
unset PYTHONDONTWRITEBYTECODE
