#!/usr/bin/env bash
# make_venv.sh DIR: a virtual environment in DIR, from $PYTHON or the newest of python3.13, 3.12, 3.11 and python3 that is
# at least 3.11 and can make one. Does nothing when DIR has a Python already.
set -euo pipefail

dir=$1
if [ -x "$dir/bin/python" ] && "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
  exit 0
fi

# A name on PATH proves little: version managers put launchers there for versions that are switched off.
version_of() { "$1" -c 'import sys; v = sys.version_info; print("%d.%d.%d" % v[:3] if v >= (3, 11) else "")' 2>/dev/null || true; }

without_venv=""
for python in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
  version=$(version_of "$python")
  if [ -z "$version" ]; then
    continue
  elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    without_venv="$without_venv $python"
    continue
  fi
  echo "making $dir with Python $version ($(command -v "$python"))"
  exec "$python" -m venv "$dir"
done

if [ -n "$without_venv" ]; then
  echo "Found$without_venv, but the modules venv and ensurepip are missing. Debian and Ubuntu have them in a package of" >&2
  echo "their own; run this, then make again:" >&2
  echo >&2
  echo "    sudo apt-get install -y python3-venv" >&2
elif [ -n "${PYTHON:-}" ]; then
  echo "PYTHON=$PYTHON is not a Python >= 3.11 that runs." >&2
else
  echo "postrl needs Python >= 3.11; neither python3.13, python3.12, python3.11 nor python3 is one." >&2
  echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2
fi
exit 1
