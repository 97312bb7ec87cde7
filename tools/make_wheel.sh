#!/usr/bin/env bash
# Builds dist/sonicmoe-*.whl with the Python of the PATH. auditwheel reads which symbols of glibc and
# libstdc++ the extension uses and writes the tag that says so (manylinux_2_34 or the like). It adds
# no library: PyTorch's are there when sonicmoe is imported.
# Usage: tools/make_wheel.sh                    for all architectures of cmake/cuda.cmake
#        ARCHITECTURES=90a tools/make_wheel.sh  for fewer
#        CUDA=OFF tools/make_wheel.sh           for the CPU alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The folder lies where build lies, so that ccache finds what was compiled there.
settings=(build-dir=build-wheel cmake.define.SONICMOE_CUDA="${CUDA:-AUTO}"
  cmake.define.CMAKE_CUDA_COMPILER_LAUNCHER="$PWD/tools/compile_device.py")
command -v ccache >/dev/null && settings+=(cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache)
[[ -z ${ARCHITECTURES:-} ]] ||
  settings+=(cmake.define.SONICMOE_CUDA_ARCHITECTURES="$ARCHITECTURES")

# Without the cache, in which options of an earlier wheel would stay.
rm -rf build-wheel/wheel build-wheel/CMakeCache.txt dist
# -v: without it pip hides whether there are CUDA kernels, except in the file's name.
python -m pip wheel -v --disable-pip-version-check --no-build-isolation --no-deps \
  "${settings[@]/#/--config-settings=}" --wheel-dir build-wheel/wheel .
python -m auditwheel repair --wheel-dir dist --exclude 'libtorch*.so' --exclude 'libc10*.so' \
  build-wheel/wheel/*.whl

bundled=$(python -m zipfile -l "$(echo dist/*.whl)" | grep -c '\.so' || true)
if [[ $bundled != 1 || $(echo dist/*.whl) != *-py3-none-manylinux_*.whl ]]; then
  echo >&2 "wheel: got $bundled libraries in $(echo dist/*.whl), allowed: one, tagged manylinux"
  exit 1
fi
ls -sh dist/*.whl
