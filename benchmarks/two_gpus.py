"""Checks and times the two transports of sonicmoe.distributed on two GPUs, and writes a receipt.

    python -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 \
        --master-port 29511 benchmarks/two_gpus.py --json receipts/two_gpus.json

Sections, of which --sections takes some (two_gpus_layer.py, two_gpus_titan.py):

- agree: expert parallelism with each transport, FSDP2, and both, beside the unsharded layer
- graph: a step with the gather transport, captured in a CUDA graph and replayed on other routings
- waits: how often the host waits for the device in a step
- times: steps at the shape of Qwen3-30B, beside the layer on one GPU and beside exchanges alone
- titan, minimal_async_ep: torchtitan's own MoE, for which torchtitan and what it imports must be on
  the PYTHONPATH

`--device cpu --small` runs on gloo what needs no GPU, in seconds, to test this program.

Rank 0 writes the receipt before and after each section, so that a run that is killed leaves what it
had. A failed check or an error gives exit status 1; a target that is missed does not.
"""

import argparse
import datetime
import faulthandler
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# NVLink multicast stays off: a program that uses it can put the GPUs of a shared host out of use.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine, whose name may not resolve

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(Path(__file__).parent))
import two_gpus_layer as layer  # noqa: E402
import two_gpus_titan as titan  # noqa: E402
from arguments import positive, report_file  # noqa: E402
from two_gpus_world import World, add_names, check_names, check_two  # noqa: E402

SECTIONS = {
    "agree": layer.agree,
    "graph": layer.graph,
    "waits": layer.waits,
    "times": layer.times,
    "titan": titan.titan,
    "minimal_async_ep": titan.minimal_async_ep,
}
LAUNCH = "python -m torch.distributed.run --nproc-per-node 2 benchmarks/two_gpus.py"
SECTION_LIMITS = {"titan": 120}  # seconds, after which a section that hangs ends the run
SECTION_LIMIT = 90


def first_line(*command: str) -> str | None:
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (made.stdout.strip().splitlines() or [None])[0] if made.returncode == 0 else None


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def about(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """What ran where. Exchanges the ranks' devices."""
    name = torch.cuda.get_device_name() if world.cuda else platform.processor() or "cpu"
    library = ROOT / "python" / "sonicmoe" / "lib" / "libsonicmoe_torch.so"
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if world.cuda else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": LAUNCH + f" --device {options.device} --sections {','.join(options.sections)}",
        "commit": first_line("git", "rev-parse", "HEAD"),
        "library": hashlib.sha256(library.read_bytes()).hexdigest() if library.exists() else None,
        "devices": world.exchange(name),
        "small": options.small,
        "repeats": options.repeats,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": nccl,
            "driver": first_line(*driver) if world.cuda else None,
            "torchtitan": version_of("torchtitan"),
        },
        "environment": {
            key: os.environ[key]
            for key in sorted(os.environ)
            if key.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "CUDA_VISIBLE"))
        },
    }


class Receipt:
    """The JSON file, which rank 0 writes."""

    def __init__(self, path: Path, world: World, head: dict[str, Any]) -> None:
        self.path, self.writes = path, world.rank == 0
        self.content = {**head, "sections": {}}

    def put(self, name: str, result: dict[str, Any]) -> None:
        self.content["sections"][name] = result
        if self.writes:
            part = self.path.with_suffix(".part")  # torchrun may end this process at any time
            part.write_text(json.dumps(self.content, indent=1) + "\n")
            part.replace(self.path)


def run(world: World, receipt: Receipt, names: list[str]) -> None:
    """Each section on both ranks. An error is noted, and the next section follows, unless the ranks
    no longer meet."""
    for name in names:
        receipt.put(name, {"error": "the section has not ended"})
        faulthandler.dump_traceback_later(SECTION_LIMITS.get(name, SECTION_LIMIT), exit=True)
        began, result, error = time.perf_counter(), {}, None
        try:
            result = SECTIONS[name](world)
            world.synchronize()
        except Exception as problem:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            error = repr(problem)  # a traceback has paths of this machine
        try:
            errors = world.exchange(error)
        except Exception:  # the other rank has not come here in time: torchrun ends it
            result["error"] = f"the other rank does not come; this one: {error}"
            receipt.put(name, result)
            print("\n".join(lines(name, result)), flush=True)
            os._exit(1)
        texts = dict.fromkeys(text for text in errors if text)  # once each
        if texts:
            result["error"] = "\n".join(texts)
        result["seconds"] = round(time.perf_counter() - began, 1)
        receipt.put(name, result)
        faulthandler.cancel_dump_traceback_later()
        if world.rank == 0:
            print("\n".join(lines(name, result)), flush=True)
        del result
        gc.collect()
        if world.cuda:
            torch.cuda.empty_cache()


def lines(name: str, result: dict[str, Any]) -> list[str]:
    """A section as a part of the table."""
    made = [f"\n{name} ({result.get('seconds', 0)} s)"]
    for check in result.get("checks", []):
        verdict = "ok" if check["passed"] else "FAILED"
        made.append(f"  {verdict:7s} {check['name']:52s} {check['got']}, {check['allowed']}")
    for case, times in result.get("milliseconds", {}).items():
        made.append(f"  {case:60s} {times['median']:9.3f} ms  ({times['least']:.3f} least)")
    for target in result.get("targets", []):
        verdict = "met" if target["met"] else "missed"
        made.append(
            f"  {verdict:7s} {target['name']:52s} {target['got']:.3f}, "
            f"needed {target['needed']}, aim {target['aim']}"
        )
    made += [f"  note    {note}" for note in result.get("notes", [])]
    if "error" in result:
        made.append("  ERROR   " + result["error"].strip().replace("\n", "\n          "))
    return made


def failures(content: dict[str, Any]) -> list[str]:
    """Sections with an error, and checks that have not passed."""
    made = []
    for name, result in content["sections"].items():
        if "error" in result:
            made.append(f"{name}: error")
        made += [f"{name}: {c['name']}" for c in result.get("checks", []) if not c["passed"]]
    return made


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes, few repeats")
    add_names(parser, "sections", SECTIONS)
    parser.add_argument("--repeats", type=positive, default=None, help="default: 20; small: 2")
    parser.add_argument("--json", type=report_file, default=ROOT / "receipts" / "two_gpus.json")
    options = parser.parse_args()
    check_names(parser, options, sections=SECTIONS)
    check_two(parser, options.device)
    options.repeats = options.repeats or (2 if options.small else 20)
    return options


def main() -> int:
    options = parsed()
    world = World(options.device, options.small, options.repeats)
    receipt = Receipt(options.json, world, about(world, options))
    run(world, receipt, options.sections)
    failed = failures(receipt.content)
    if world.rank == 0:
        verdict = f"{len(failed)} failed: {'; '.join(failed)}" if failed else "all checks passed"
        print("\n" + verdict)
        print(f"{options.json}, {time.perf_counter() - world.began:.0f} s", flush=True)
    world.exchange("done")  # torchrun ends the others when one has failed
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
