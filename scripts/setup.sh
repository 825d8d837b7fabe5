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

# Where torch comes from is asked for once and remembered: a later `make test` must not change it.
wanted=${TORCH_INDEX_URL:-}
[ "${ANYRIG_SYSTEM_TORCH:-0}" = 1 ] && wanted=system
remembered=$(cat "$venv/.anyrig-torch" 2>/dev/null || echo pip)
source=${wanted:-$remembered}

# What the environment is made from: when none of it changed, there is nothing to do.
stamp=$({ cat pyproject.toml constraints.txt scripts/setup.sh; printf '%s' "$source"; } | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.anyrig-setup" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi

command -v "$python" >/dev/null || die "no $python found: install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || die "$("$python" --version) is too old: anyrig needs Python 3.11 or newer (set PYTHON=/path/to/python3.11)"
"$python" -c 'import venv, ensurepip' 2>/dev/null || die "Python's venv module is missing (Debian: apt-get install python3-venv)"

if [ -e "$venv" ] && { [ "$source" != "$remembered" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
  say "making $venv anew (another torch was asked for, or it was not finished)"
  rm -rf "$venv"
fi
if [ ! -x "$venv/bin/python" ]; then
  say "making $venv with $("$python" --version)"
  if [ "$source" = system ]; then
    "$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null \
      || die "ANYRIG_SYSTEM_TORCH=1, but $python has no torch: install it there first"
    "$python" -m venv --system-site-packages "$venv"
  else
    "$python" -m venv "$venv"
  fi
fi
printf '%s' "$source" > "$venv/.anyrig-torch"
bin="$venv/bin"
pip() { "$bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

constraints=constraints.txt
if have=$("$bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null); then
  say "keeping the installed torch $have"
elif [ "$source" != pip ]; then
  say "installing torch from $source"
  pip install torch --index-url "$source"
else
  version=$(sed -n 's/^torch==//p' constraints.txt)
  say "installing torch $version, the build that pip finds (TORCH_INDEX_URL names another index: CPU, CUDA or ROCm)"
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
