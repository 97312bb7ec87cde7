#!/usr/bin/env bash
# Makes .venv-NAME for each framework of tools/integrations/NAME.txt: its pinned packages, beside the
# packages of .venv, so that all environments share one torch. Needs .venv (tools/setup.sh).
# Usage: tools/setup_integrations.sh [NAME...]    all frameworks without a NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

names=("$@")
if (($# == 0)); then
  for file in tools/integrations/*.txt; do names+=("$(basename "$file" .txt)"); done
fi
shared=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
for name in "${names[@]}"; do
  requirements=tools/integrations/$name.txt
  if [[ ! -f $requirements ]]; then
    echo >&2 "setup: there is no $requirements; allowed: $(cd tools/integrations && echo *.txt)"
    exit 2
  fi
  stamp=.venv-$name/setup-stamp
  wanted=$( (echo "$shared"; cat "$requirements") | sha256sum)
  [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]] || continue
  echo "setup: packages of $name into .venv-$name"
  .venv/bin/python -m venv --clear --without-pip ".venv-$name"
  python=.venv-$name/bin/python
  packages=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  # addsitedir reads the .pth files there too, of which one leads to sonicmoe.
  echo "import site; site.addsitedir('$shared')" >"$packages/shared.pth"
  .venv/bin/python -m pip --python "$python" install --disable-pip-version-check --no-deps -q \
    -r "$requirements"
  echo "$wanted" >"$stamp"
done
