#!/usr/bin/env bash
# Every public header compiles by itself, without warnings, with each compiler that is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for compiler in g++ clang++; do
  command -v "$compiler" >/dev/null || { echo "headers: no $compiler here"; continue; }
  count=0
  while read -r header; do
    # Twice: the second one must change nothing.
    printf '#include "%s"\n#include "%s"\n' "${header#include/}" "${header#include/}" |
      "$compiler" -std=c++20 -Wall -Wextra -Wshadow -Wpedantic -Werror -fsyntax-only -Iinclude \
        -x c++ - || { echo >&2 "headers: $header does not compile alone with $compiler"; exit 1; }
    count=$((count + 1))
  done < <(find include -name '*.h' | sort)
  ((count)) || { echo >&2 "headers: none found"; exit 1; }
  echo "headers: $count compile alone with $compiler"
done
