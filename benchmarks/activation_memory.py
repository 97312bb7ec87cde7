"""What a layer keeps for backward, over the granularity of its experts at constant FLOPs.

    python benchmarks/activation_memory.py

`sonicmoe info` makes the plan of each shape and says how many bytes it keeps: the input, the
pre-activation and the routing. With recompute=preact the pre-activation is computed again. Plans of
the GPU keep the same bytes as those of the CPU, so that this needs no GPU.
tools/figures.py draws the receipt.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: n, E and K with one product of K and n, and one of E and n; the 30B row of the published figures.
TOKENS, HIDDEN = 32768, 4096
GRANULARITY = ((2048, 32, 2), (1024, 64, 4), (512, 128, 8), (256, 256, 16), (128, 512, 32))
RECOMPUTE = ("none", "preact")


def kept(program: Path, layer: str) -> int:
    done = subprocess.run(
        [str(program), "info", "--layer", layer], capture_output=True, text=True, check=True
    )
    found = re.search(r"^saved for backward, (\d+) bytes$", done.stdout, re.M)
    if found is None:
        raise SystemExit(f"{program}: its plan of '{layer}' says nothing of bytes kept")
    return int(found[1])


def measure(program: Path) -> dict[str, Any]:
    rows = []
    for intermediate, experts, top_k in GRANULARITY:
        text = f"tokens={TOKENS} hidden={HIDDEN} intermediate={intermediate} experts={experts}"
        for recompute in RECOMPUTE:
            layer = f"{text} top_k={top_k} dtype=bf16 recompute={recompute}"
            rows.append(
                {
                    "thiek": [TOKENS, HIDDEN, intermediate, experts, top_k],
                    "recompute": recompute,
                    "bytes": kept(program, layer),
                    "command": f"build/bin/sonicmoe info --layer '{layer}'",
                }
            )
    return {"command": "python benchmarks/activation_memory.py", "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    program = ROOT / "build" / "bin" / "sonicmoe"
    parser.add_argument("--program", type=Path, default=program, help="default: %(default)s")
    receipt = ROOT / "receipts" / "activation_memory.json"
    parser.add_argument("--json", type=Path, default=receipt, help="default: %(default)s")
    options = parser.parse_args()
    options.json.write_text(json.dumps(measure(options.program), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
