#!/usr/bin/env bash
# Installs the library, static and shared, and builds and runs tests/consumer with what was
# installed. Leaves the prefixes in build-{static,shared}/prefix. The folders lie where build lies,
# so that ccache finds what was compiled there (CCACHE_BASEDIR of the Makefile).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

configure=(cmake -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release)
command -v ccache >/dev/null && configure+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cuda=(-DSONICMOE_CUDA="${CUDA:-AUTO}" "-DSONICMOE_CUDA_ARCHITECTURES=${ARCHITECTURES:-90a}"
  -DCMAKE_CUDA_COMPILER_LAUNCHER="$PWD/tools/compile_device.py")

for kind in static shared; do
  folder=$PWD/build-$kind
  prefix=$folder/prefix
  rm -rf "$prefix" "$folder/consumer"
  "${configure[@]}" "${cuda[@]}" -S . -B "$folder" -DCMAKE_INSTALL_PREFIX="$prefix" \
    -DSONICMOE_TESTS=OFF -DSONICMOE_CLI=OFF \
    -DBUILD_SHARED_LIBS="$([[ $kind == shared ]] && echo ON || echo OFF)"
  cmake --build "$folder"
  cmake --install "$folder" >/dev/null
  "${configure[@]}" -S tests/consumer -B "$folder/consumer" -DCMAKE_PREFIX_PATH="$prefix"
  cmake --build "$folder/consumer"
  "$folder/consumer/consumer"
  echo "install: the $kind library works in a project of its own"
done

# A shared library shows its own API and nothing else: OpenBLAS in particular stays private. (The
# type names that libstdc++'s templates leave in every library do not matter.)
strays=$(nm -D --defined-only -C build-shared/prefix/lib*/libsonicmoe.so | cut -d' ' -f3- |
  grep -e '^[^:]*$' -e 'sonicmoe::\(cpu\|math\)::' || true)
if [[ -n $strays ]]; then
  echo >&2 "install: libsonicmoe.so exports what is not ours:"
  head -20 >&2 <<<"$strays"
  exit 1
fi
