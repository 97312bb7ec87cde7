#!/usr/bin/env bash
# Installs the package as a user would, in environments of its own:
#   1. the wheel of dist/ (tools/make_wheel.sh), which then runs the Python tests;
#   2. an editable copy of this tree, on a machine that has no nvcc;
#   3. the wrong turns: each must fail, and say what to do.
# The environments share PyTorch and the build's packages with the Python of the PATH. They do not
# see its .pth files, of which one leads to this tree's sonicmoe.
# Usage: tools/check_wheel.sh [PYTEST_ARGUMENT...]    for example -k version
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH CMAKE_ARGS CUDACXX CUDA_HOME

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
shared=$(python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
version=$(sed -n 's/^project(sonicmoe VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
wheel=$(echo dist/*.whl)

fail() { echo >&2 "wheel: $1"; exit 1; }

environment() {  # NAME: an empty one in $work
  python -m venv --without-pip "$work/$1"
  # A plain path: Python does not read the .pth files that lie there.
  echo "$shared" >"$(echo "$work/$1"/lib/python3*/site-packages)/shared.pth"
}
install() {  # NAME ARGUMENT...
  python -m pip --python "$work/$1/bin/python" install --disable-pip-version-check \
    --no-build-isolation --no-deps "${@:2}"
}
use() {  # NAME VERSION: a step of training
  (cd "$work" && "$1/bin/python" - "$work/$1/" "$2" <<'PYTHON'
import importlib.metadata
import sys

import sonicmoe
import torch

where, version = sys.argv[1:]
found = importlib.metadata.version("sonicmoe"), sonicmoe.__version__
assert found == (version, version), f"got versions {found}, allowed: {version}"
assert sonicmoe.has_cuda() == ("+cpu" not in version)
assert str(sonicmoe._ops._LIBRARY).startswith(where), sonicmoe._ops._LIBRARY
moe = sonicmoe.MoE(4, 2, 64, 32, sonicmoe.ActivationType.SWIGLU, False, 0.1)
moe(torch.randn(16, 64))[0].sum().backward()
assert all(parameter.grad is not None for parameter in moe.parameters())
print(f"wheel: sonicmoe {version} of {sonicmoe.__path__} trains")
PYTHON
  )
}

echo "=== $wheel"
[[ -f $wheel ]] || fail "got $wheel, allowed: one file; tools/make_wheel.sh builds it"
[[ $wheel == dist/sonicmoe-$version@(+cpu|)-py3-none-manylinux_*.whl ]] ||
  fail "got $wheel, allowed: version $version or $version+cpu, a manylinux tag"
environment wheel
install wheel -q "$wheel"
use wheel "$(cut -d- -f2 <<<"$wheel")"
# What the tests read, and no package: it can only come from the wheel.
mkdir "$work/tests"
git ls-files -z -- python/tests conftest.py pyproject.toml CMakeLists.txt docs benchmarks |
  tar c --null -T - | tar x -C "$work/tests"
(cd "$work/tests" && "$work/wheel/bin/python" -m pytest -q -p no:cacheprovider python/tests "$@")

# A copy as git has it, without .venv and build. It lies so that ccache finds what was compiled.
tree=$PWD/build-wheel/tree
rm -rf "$tree"
mkdir -p "$tree"
git ls-files -z | tar c --null -T - | tar x -C "$tree"
settings=(--config-settings=build-dir=build)
command -v ccache >/dev/null &&
  settings+=(--config-settings=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache)
# A PATH without nvcc, and no toolkit elsewhere.
bare=$(tr : '\n' <<<"$PATH" | while read -r folder; do
  [[ -x $folder/nvcc ]] || printf '%s:' "$folder"
done)
bare=${bare%:}

echo "=== pip install -e"
environment editable
(export PATH=$bare CUDA_HOME=/nonexistent && install editable -q "${settings[@]}" -e "$tree")
use editable "$version+cpu"

echo "=== Wrong turns"
environment wrong
mkdir "$work/12.8" "$work/99.0"
for release in 12.8 99.0; do
  printf '#!/bin/sh\necho "Cuda compilation tools, release %s, V%s.1"\n' $release $release \
    >"$work/$release/nvcc"
  chmod +x "$work/$release/nvcc"
done
log=$work/log
cpu_alone=cmake.define.SONICMOE_CUDA=OFF
refused() {  # TITLE TEXT... -- VARIABLE=VALUE... [PIP_ARGUMENT...]
  local title=$1 texts=() variables=(PATH="$bare" CUDA_HOME=/nonexistent)
  shift
  while [[ $1 != -- ]]; do texts+=("$1") && shift; done
  shift
  while (($#)) && [[ $1 != --* ]]; do variables+=("$1") && shift; done
  rm -rf "$tree/build"
  if (export "${variables[@]}" && install wrong "${settings[@]}" "$@" "$tree") >"$log" 2>&1; then
    fail "$title: got a package, allowed: an error"
  fi
  for text in "${texts[@]}"; do
    # CMake breaks lines where it likes.
    tr -s ' \n' '  ' <"$log" | grep -qF -- "$text" || { cat "$log"; fail "$title: no \"$text\""; }
  done
  echo "wheel: $title is refused"
}
old=("got nvcc 12.8 ($work/12.8/nvcc), allowed: nvcc" "Install a newer CUDA toolkit" "$cpu_alone")
refused "an old nvcc in PATH" "${old[@]}" -- PATH="$work/12.8:$bare"
refused "an old nvcc in CUDACXX" "${old[@]}" -- CUDACXX="$work/12.8/nvcc"
refused "no nvcc with SONICMOE_CUDA=ON" "got ON, but there is no nvcc" "$cpu_alone" -- \
  --config-settings=cmake.define.SONICMOE_CUDA=ON
refused "an nvcc in CUDACXX that is none" "CUDACXX: got /nonexistent" "$cpu_alone" -- \
  CUDACXX=/nonexistent
refused "a version that the build does not match" "is to be $version, but CMake builds $version+cpu" \
  "$cpu_alone" -- CUDACXX="$work/99.0/nvcc" CMAKE_ARGS=-DSONICMOE_CUDA=OFF
mkdir "$work/alone"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v python)" >"$work/alone/python"
chmod +x "$work/alone/python"
refused "no compiler" "there is no C++ compiler" "apt-get install g++" -- PATH="$work/alone"
libraries=$(g++ -print-multiarch)
# The folders where it could lie are ignored; FindOpenMP would look there for pthread.
refused "no OpenBLAS" "libopenblas.a is missing" "apt-get install libopenblas-serial-dev" -- \
  --config-settings=cmake.define.OpenMP_pthread_LIBRARY=pthread \
  --config-settings="cmake.define.CMAKE_IGNORE_PATH=$(
    printf '%s;' {/usr,}/lib/"$libraries"{,/openblas-serial})"
echo "wheel: the wheel, an editable copy and the wrong turns behave"
