#!/usr/bin/env bash
# test_parity.sh VENV: the parity tests against Hugging Face transformers, where the package index has torch's CPU build.
# The ordinary build brings gigabytes of GPU libraries, which a test must not pull in unasked: there, it says so and stops.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1/bin/python
torch=torch==2.13.0

if ! "$python" -c 'import torch, transformers, accelerate' 2>/dev/null; then
  pip=("$python" -m pip --disable-pip-version-check install -qq)
  found=$("${pip[@]}" --dry-run --no-deps --ignore-installed --report - "$torch" 2>/dev/null |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null || true)
  case $found in
  *+cpu) ;;
  *)
    echo "parity tests not run: the package index offers ${found:-no} $torch, not its CPU build."
    echo "To run them: install torch, then: $python -m pip install -e '.[parity]' && $python -m pytest tests/test_parity.py"
    exit 0
    ;;
  esac
  "${pip[@]}" --no-compile "$torch" --editable '.[gguf,test,parity]'
fi
exec "$python" -m pytest tests/test_parity.py
