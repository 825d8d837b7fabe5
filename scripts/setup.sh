#!/usr/bin/env bash
# Make the virtual environment that the Makefile uses. Idempotent: a finished set-up costs a fraction of a second.
#
#   PYTHON            interpreter to use (default: python3; 3.11 or newer)
#   VENV              where the environment goes (default: .venv)
#   TORCH_INDEX_URL   package index with the torch build you want, e.g. that of a CUDA or ROCm release
#   ANYRIG_SYSTEM_TORCH=1   use the torch that $PYTHON already has instead of installing one
#   CXX               C++ compiler for the CPU kernels; without one they are left out
#
# `scripts/setup.sh kernels` (make kernels) compiles the CPU kernels only, in seconds, and shows what the compiler says.
# ISA=avx512 compiles one of the modules only: the others stay as they were until the next make setup.
# SANITIZE=address,undefined compiles them with these sanitizers, in a folder of their own; the next build undoes it.
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

# What the environment and its kernels are made from: what did not change is not made again.
stamp=$({ cat pyproject.toml constraints.txt scripts/setup.sh; printf '%s' "$source"; } | sha256sum | cut -d' ' -f1)
compiler=$(command -v "${CXX:-c++}" || command -v g++ || command -v clang++ || true)
kernels=$({ cat CMakeLists.txt; find csrc -type f -print0 | sort -z | xargs -0 cat; printf '%s' "$compiler"; } \
  | sha256sum | cut -d' ' -f1)
bin="$venv/bin"
build="$venv/kernels" # pip compiles there too, so that later only what changed is compiled
pip() { "$bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
editable() { pip install --no-build-isolation --config-settings "build-dir=$build" "$@"; }
place() { printf '%s/anyrig/ops/cpu' "$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"; }
there() { compgen -G "$(place)/_*.so" >/dev/null; }
no_compiler="no C++ compiler (Debian: apt-get install g++; Fedora: dnf install gcc-c++)"

compile_kernels() {
  local folder=$build found=true path
  path="$(cd "$bin" && pwd):$PATH" # cmake and ninja come from PyPI where the machine has none
  there || found=false
  if [ -n "${SANITIZE:-}" ]; then folder="$build-sanitized"; fi
  [ -e "$folder/build.ninja" ] || rm -rf "$folder" # nothing is learnt from a failed try
  if [ ! -d "$folder" ] || [ -n "${SANITIZE:-}" ]; then
    PATH=$path cmake -G Ninja -S . -B "$folder" -DCMAKE_BUILD_TYPE=Release "-DANYRIG_SANITIZE=${SANITIZE:-}" \
      "-DPython_EXECUTABLE=${path%%:*}/python" "-Dnanobind_DIR=$("$bin/python" -m nanobind --cmake_dir)" || return 1
  fi
  PATH=$path cmake --build "$folder" ${ISA:+--target "_$ISA"} || return 1
  # An installation that was made without kernels does not look for any: make it anew.
  if [ $found = false ]; then editable --no-deps -e . && there || return 1; fi
  PATH=$path cmake --install "$folder" ${ISA:+--component "$ISA"} --prefix "$(place)/../../.." >/dev/null
}

if [ "${1:-}" = kernels ]; then
  [ -x "$bin/python" ] || die "there is no $venv yet: run make setup"
  [ -n "$compiler" ] || die "$no_compiler"
  compile_kernels || die "the kernels could not be compiled"
  if [ -n "${SANITIZE:-}${ISA:-}" ]; then kernels="SANITIZE=${SANITIZE:-} ISA=${ISA:-}"; fi # not what `setup` wants
  printf '%s' "$kernels" > "$venv/.anyrig-kernels"
  exit 0
fi

if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.anyrig-setup" 2>/dev/null)" = "$stamp" ]; then
  [ "$(cat "$venv/.anyrig-kernels" 2>/dev/null)" != "$kernels" ] || exit 0
  if [ -n "$compiler" ]; then
    say "compiling the CPU kernels, which changed"
    compile_kernels || die "the kernels could not be compiled"
  else
    say "removing the CPU kernels, which changed: $no_compiler"
    editable --no-deps -e .
  fi
  printf '%s' "$kernels" > "$venv/.anyrig-kernels"
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
# Built with the environment's own build tools rather than with a copy that pip throws away: paths stay, and so does what
# was compiled. The backend itself says whether this machine also needs cmake and ninja from PyPI.
pip install -c "$constraints" scikit-build-core nanobind
asked=$("$bin/python" -c 'from scikit_build_core.build import get_requires_for_build_editable as ask; print(*ask({}))')
[ -z "$asked" ] || pip install $asked # shellcheck disable=SC2086
editable -c "$constraints" -e '.[dev]'
if ! there; then
  if [ -n "$compiler" ]; then
    say "WITHOUT the CPU kernels: $compiler could not compile them (make kernels shows why); plain torch is used"
  else
    say "WITHOUT the CPU kernels: $no_compiler; plain torch is used"
  fi
fi
printf '%s' "$kernels" > "$venv/.anyrig-kernels"
printf '%s' "$stamp" > "$venv/.anyrig-setup"
say "ready: $bin/anyrig --help"
