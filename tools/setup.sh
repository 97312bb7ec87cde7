#!/usr/bin/env bash
# Installs what the build, the tests and the demo need, and only what is missing: Debian packages
# (as root; otherwise prints the line to run and fails) and Python packages into .venv.
# Usage: tools/setup.sh [PACKAGE...]    further Debian packages to install
# CUDA=OFF tools/setup.sh               without what the CUDA backend is compiled with
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# OpenBLAS twice: the library takes the serial build, `sonicmoe bench` compares with the threaded.
# python3-dev: torch.compile builds its C++ kernels against Python.h.
packages=(make g++ ccache libopenblas-serial-dev libopenblas-pthread-dev libgtest-dev libcli11-dev
          nlohmann-json3-dev python3-venv python3-dev "$@")

if command -v dpkg-query >/dev/null; then
  missing=()
  for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [[ $status == "install ok installed" ]] || missing+=("$package")
  done
  if ((${#missing[@]})); then
    if ((EUID != 0)); then
      echo >&2 "setup: Debian packages are missing. Run this line, then your command again:"
      echo >&2 "  sudo apt-get install -y ${missing[*]}"
      exit 1
    fi
    echo "setup: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # An unreachable third-party source makes the update fail although ours is fresh; what is
    # really missing makes the installation fail.
    apt-get update -qq || true
    apt-get install -qq -y --no-install-recommends "${missing[@]}" </dev/null
  fi
else
  echo "setup: not a Debian system; needed are the equivalents of: ${packages[*]}"
fi

# The stamp makes a second run a matter of milliseconds.
stamp=.venv/setup-stamp
wanted=$( (python3 --version; pwd; cat tools/requirements.txt) | sha256sum)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo >&2 "setup: python3 is $(python3 --version), needed is 3.11 or newer"
    exit 1
  fi
  echo "setup: Python packages into .venv (5 GB: PyTorch brings its CUDA libraries along)"
  python3 -m venv .venv
  .venv/bin/python -m pip install --disable-pip-version-check -r tools/requirements.txt
  # `import sonicmoe` finds the package of this tree.
  echo "$PWD/python" >"$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/sonicmoe.pth"
  echo "$wanted" >"$stamp"
fi

# The CUDA backend is compiled with nvcc of the PATH or /usr/local/cuda, else with the Python wheels
# that make up a toolkit beside the runtime that torch brought.
if [[ ${CUDA:-AUTO} != OFF ]]; then
  pip=(.venv/bin/python -m pip install --disable-pip-version-check --no-deps -q)
  packages=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
  version() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p'; }
  # The build's own rule. What it finds in .venv may be older than the wheels wanted now.
  nvcc=$(.venv/bin/cmake -P cmake/find_nvcc.cmake 2>/dev/null || true)
  if [[ -z $nvcc || $nvcc == */.venv/* ]]; then
    nvcc=$packages/nvidia/cu13/bin/nvcc
    wheels=$(<tools/requirements-nvcc.txt)
    if [[ ! -x $nvcc || $(cat .venv/nvcc-stamp 2>/dev/null) != "$wheels" ]]; then
      echo "setup: there is no nvcc of CUDA 13; its Python wheels go into .venv (0.3 GB)"
      "${pip[@]}" -r tools/requirements-nvcc.txt
      echo "$wheels" >.venv/nvcc-stamp
    fi
  fi
  echo "setup: CUDA backend with $nvcc, CUDA $(version "$nvcc")"
fi
