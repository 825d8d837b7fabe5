#!/usr/bin/env bash
# Make the virtual environment that the Makefile uses. Idempotent: a finished set-up costs a fraction of a second.
#
#   PYTHON            interpreter to use (default: python3; 3.11 or newer)
#   VENV              where the environment goes (default: .venv)
#   TORCH_INDEX_URL   package index with the torch build you want, e.g. that of a CUDA or ROCm release
#   ANYRIG_SYSTEM_TORCH=1   use the torch that $PYTHON already has instead of installing one
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
python=${PYTHON:-python3}
say() { printf '%s\n' "setup: $*"; }
die() { printf '%s\n' "setup: $*" >&2; exit 1; }

# What the environment is made from: when none of it changed, there is nothing to do.
key=$(cat pyproject.toml constraints.txt scripts/setup.sh; printf '%s' "${TORCH_INDEX_URL:-}${ANYRIG_SYSTEM_TORCH:-}")
stamp=$(printf '%s' "$key" | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.anyrig-setup" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi

command -v "$python" >/dev/null || die "no $python found: install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || die "$("$python" --version) is too old: anyrig needs Python 3.11 or newer (set PYTHON=/path/to/python3.11)"
"$python" -c 'import venv, ensurepip' 2>/dev/null || die "Python's venv module is missing (Debian: apt-get install python3-venv)"

if [ ! -x "$venv/bin/python" ]; then
  say "making $venv with $("$python" --version)"
  if [ "${ANYRIG_SYSTEM_TORCH:-0}" = 1 ]; then
    "$python" -m venv --system-site-packages "$venv"
  else
    "$python" -m venv "$venv"
  fi
fi
bin="$venv/bin"
pip() { "$bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

constraints=constraints.txt
if have=$("$bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null); then
  say "keeping the installed torch $have"
elif [ -n "${TORCH_INDEX_URL:-}" ]; then
  say "installing torch from TORCH_INDEX_URL"
  pip install torch --index-url "$TORCH_INDEX_URL"
else
  version=$(sed -n 's/^torch==//p' constraints.txt)
  say "installing torch $version (CPU; set TORCH_INDEX_URL for CUDA or ROCm)"
  # A CPU build where an index has one; PyPI's own wheel otherwise (which brings CUDA libraries on x86 Linux).
  pip install "torch==$version"
fi
have=$("$bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
if [ "$have" != "$(sed -n 's/^torch==//p' constraints.txt)" ]; then
  constraints="$venv/constraints.txt" # the user's own torch wins over our pin
  grep -v '^torch==' constraints.txt > "$constraints"
  echo "torch==$have" >> "$constraints"
fi

say "installing anyrig and its tools"
pip install -c "$constraints" -e '.[dev]'
printf '%s' "$stamp" > "$venv/.anyrig-setup"
say "ready: $bin/anyrig --help"
