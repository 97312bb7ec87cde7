#!/usr/bin/env python3
"""Checks everything on a GPU and writes a receipt; tells whether a receipt still vouches for a build.

    tools/gpu_check.py pack BUILD FOLDER    what a machine with a GPU needs, compressed, into FOLDER
    tools/gpu_check.py run FOLDER           there: tests, sanitizers, benchmark -> FOLDER/receipt/
                                            (--part tests, sanitizers, then bench: in three calls)
    tools/gpu_check.py verify BUILD         anywhere: does a receipt cover this build?

BUILD is a build folder with CUDA and the PyTorch extension (`make build`; with
-DSONICMOE_PORTABLE=ON its programs run on machines without our libraries). A receipt holds a digest
of all that enters the device code, the GPU tests and the benchmark, read off the build graph, flags
included. It also holds a digest of each kernel's machine code (tools/machine_code.py). `verify`
accepts changed sources if the receipt has the machine code of every kernel: moved files, new names
and new comments need no GPU. It does not notice when host code or a test's body changed as well.

The figures of the documents come from receipts/h200.json, written on an H200. A receipt without
the benchmark tells as well whether all is right. An H100, or an H200 with --quick, writes it as
receipts/untimed.json, which covers a build, too.

`verify` fails, too, when a kernel or test of the build is not in the receipt, passed. If it was
only renamed, receipts/renamed.json gives the new and the old part of its name:

    {"kernels": [["new.", "old."]], "tests": [["/new_", "/old_"]]}

Where the receipt lacks a name, `verify` replaces new parts by old ones, in this order. It refuses
entries that no name needs, as after a new receipt. receipts/pending.md may say what is not verified
yet; that file may be 10 commits old.
"""

import argparse
import datetime
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine_code

ROOT = Path(__file__).resolve().parent.parent
RECEIPT = ROOT / "receipts" / "h200.json"
UNTIMED = ROOT / "receipts" / "untimed.json"
RENAMED = ROOT / "receipts" / "renamed.json"
PENDING = ROOT / "receipts" / "pending.md"
EXAMPLE = "bin/cuda_layer"
PROGRAMS = ("bin/gpu_test", "bin/sonicmoe", EXAMPLE)
EXTENSION = "python/sonicmoe/lib/libsonicmoe_torch.so"
# Built into the same programs, or beside them, but judged without a GPU.
NOT_ON_GPU = ("src/cpu/", "cli/tests/")
GPU_PYTHON_TESTS = (
    "python/tests/test_cuda.py",
    "python/tests/test_cuda_error.py",
    "python/tests/test_cuda_experts.py",
    "python/tests/test_cuda_grouped.py",
    "python/tests/test_cuda_losses.py",
    "python/tests/test_cuda_original.py",
    "python/tests/test_cuda_recompute.py",
    "python/tests/test_cuda_router.py",
    "python/tests/test_cuda_shapes.py",
)
BESIDE = (
    *GPU_PYTHON_TESTS,
    "python/tests/helpers.py",
    "python/tests/test_experts.py",
    "python/tests/test_grouped.py",
    "python/tests/test_lists.py",
    "python/tests/test_losses.py",
    "python/tests/test_recompute.py",
    "python/tests/test_router.py",
    "benchmarks/arguments.py",
    "benchmarks/dense_bound.py",
    "benchmarks/moe-cute.py",
)
MAX_PENDING_COMMITS = 10
# What a receipt has of the parts that --again may take from it.
PARTS = {
    "tests": ("tests", "pytest_exit", "errors", "python", "kernels", "test_names"),
    "sanitizers": ("sanitizer",),
}
# Beside the published configurations: few tokens, many experts.
SMALL = "4096,2048,768,128,8"
# The first asks how much memory the whole device has left, the others take much of it.
ALONE = "CudaPlan.CallsTakeNoDeviceMemory:Types/Large.*"
# The other tests go in so many processes at a time: what they wait for is mostly the oracle.
SHARDS = 13
# Every kernel once, in what a sanitizer can afford.
SANITIZED = ":".join(
    [
        "Kernels/ExactGemm.Quick/*",
        "Kernels/ExactDynamic.CountsInTheGivenCounter/sm90_down_proj_dgrad_128x256",
        "Kernels/ExactRouterGemm.Quick/*",
        "Kernels/ExactWeightGradient.AnyNumberOfRows/sm90_up_proj_wgrad_256x128",
        "Beside.SmallShape",
        "Aggregate.*",
        "ScoreGrad.*",
        "Metadata.CountsOfTopKQuick",
        "Metadata.WrongCountsOfTopKLeadNowhere",
        "Segments.WrongNumbers",
        "AuxLoss.NothingCounts",
        "AuxLoss.MaskedTokensAreNotRead",
        "TopK.OtherScoresByHand",
        "TopK.GroupsByHand",
        "ZeroTail.*",
        "UpdateSelectionBias.*",
    ]
    + [
        f"Cases/Layer.{test}/{case}"
        for test in ("AgreesWithTheOracle", "OperationsAgreeWithTheOracle")
        for case in (
            "activation_geglu_separate_bias_f16",
            "router_topk_over_softmax_bias_bf16",
            "router_sqrt_softplus_dlogits_f16",
            "router_deepseek_v3_f32_router_bf16",
            "router_deepseek_v3_e256_bf16",
            "router_many_groups_bf16",
            "given_hostile_bias_swiglu_bf16",
            "given_hostile_bias_transposed_interleaved_bf16",
            "rounding_stochastic_topk_over_softmax_f16",
            "sums_topk_bf16",
            "sums_given_f16",
            "given_no_rows_bf16",
            "given_sentinels_only_f16",
            "input_ids_and_weights_hostile_bias_f16",
            "rows_after_down_bias_hostile_bf16",
            "rows_tile_counts_f16",
        )
    ]
)


def output(*command: str, **options) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


# What a receipt vouches for.


def repository_files(build: Path) -> set[str]:
    """Files of this tree that enter the programs and the extension: sources and their headers."""
    ninja = ["ninja", "-C", str(build)]
    inputs = output(*ninja, "-t", "inputs", *PROGRAMS, str(ROOT / EXTENSION)).splitlines()
    inputs = [line for line in inputs if not line.startswith("ninja:")]
    objects = {line for line in inputs if line.endswith(".o")}
    found, owner = {line for line in inputs if line.startswith(str(ROOT))}, ""
    for line in output(*ninja, "-t", "deps").splitlines():
        if line.startswith("    "):
            if owner in objects:
                found.add(os.path.normpath(build / line.strip()))
        else:
            owner = line.split(":")[0]
    names = {os.path.relpath(path, ROOT) for path in found if path.startswith(f"{ROOT}/")}
    return {
        name
        for name in names
        if not name.startswith((*NOT_ON_GPU, ".venv/", "build"))
        and Path(name).suffix in (".h", ".cuh", ".cpp", ".cu")
    } | set(BESIDE)


def flags(build: Path, names: set[str]) -> list[str]:
    """How each source is compiled, without the places where things lie."""
    lines = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        name = os.path.relpath(entry["file"], ROOT)
        if name in names:
            words = [
                word
                for word in entry["command"].split()
                if word.startswith(("-O", "-D", "-f", "-m", "-std", "-gen", "--", "-X", "-W"))
                and not word.startswith(("-DSONICMOE_CUBLAS_HINT", "-DSONICMOE_VERSION"))
                and "/" not in word
            ]
            lines.append(f"{name}: {' '.join(words)}")
    return sorted(lines)


def compiler_version(build: Path) -> str:
    cache = (build / "CMakeCache.txt").read_text()
    nvcc = re.search(r"^CMAKE_CUDA_COMPILER:\w+=(.*)$", cache, re.MULTILINE)
    if nvcc is None:
        sys.exit(f"gpu_check: {build} was configured without CUDA")
    release = re.search(r"release ([0-9.]+)", output(nvcc[1], "--version"))
    if release is None:
        sys.exit(f"gpu_check: {nvcc[1]} --version names no release")
    return release[1]


def digest(build: Path) -> str:
    names = repository_files(build)
    state = hashlib.sha256()
    for text in (compiler_version(build), *flags(build, names)):
        state.update(text.encode() + b"\n")
    for name in sorted(names):
        state.update(f"{name}\n".encode() + (ROOT / name).read_bytes())
    return state.hexdigest()


def listed_tests(program: Path, names: str = "*") -> list[str]:
    tests, suite = [], ""
    for line in output(str(program), "--gtest_list_tests", f"--gtest_filter={names}").splitlines():
        name = line.split("#")[0].strip()
        if line.startswith("  "):
            tests.append(suite + name)
        elif name.endswith("."):
            suite = name
    return tests


def cuda_kernels(program: Path, scratch: Path) -> list[str]:
    output(str(program), "info", "--json", str(scratch))
    kernels = json.loads(scratch.read_text())["kernels"]
    scratch.unlink()
    return [kernel["name"] for kernel in kernels if kernel["device"] == "cuda"]


# pack


def pack(build: Path, folder: Path) -> int:
    subprocess.run(["ninja", "-C", build], check=True)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*(build / program for program in PROGRAMS), ROOT / EXTENSION):
        copy = folder / path.name
        shutil.copy(path, copy)
        subprocess.run(["strip", copy], check=True)
        with copy.open("rb") as plain, lzma.open(f"{copy}.xz", "wb", preset=1) as packed:
            shutil.copyfileobj(plain, packed)
        copy.unlink()
    for part in PARTS:  # of the programs that were here before
        (folder / f"{part}.json").unlink(missing_ok=True)
    manifest: dict[str, Any] = {
        "digest": digest(build),
        "commit": output("git", "rev-parse", "HEAD", cwd=ROOT).strip(),
        "cuda": compiler_version(build),
        "machine_code": machine_code.kernels(build),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"gpu_check: {folder} holds what {manifest['digest'][:12]} needs")
    return 0


def weak_bound(rows: list[dict], python: dict | None) -> str:
    """What is wrong with the bound beside torch.bmm at 7B-n256, in the same run; empty if nothing."""
    bound = [row["dense_bound_ms"] for row in rows
             if row["config"] == "7B-n256" and row["what"] == "total"]  # fmt: skip
    if not bound or not bound[0] or not python:
        return "bound: not measured beside torch.bmm"
    if bound[0] > 1.03 * python["dense_bound_ms"]:
        return f"bound: {bound[0]:.3f} ms, over 3 % slower than torch.bmm's {python['dense_bound_ms']:.3f}"
    return ""


# run


def sanitizer_state(codes: list[int]) -> str:
    """Of a sanitizer in several processes, by their exit statuses (negative: ended by a signal)."""
    failed = [code for code in codes if code != 0]
    code = 9 if 9 in failed else failed[0] if failed else 0
    return {0: "clean", 9: "errors", 124: "not finished"}.get(code, f"exit {code}")


def without_paths(log: str, folder: Path) -> str:
    """A log that can be committed: without the folders of the machine that wrote it."""
    for path, name in (
        (sys.executable, "python3"),
        (str(folder), "build-gpu"),
        (f"{sys.prefix}{os.sep}", ""),
        (f"{ROOT}{os.sep}", ""),
        (str(ROOT), "."),
    ):
        log = log.replace(path, name)
    return log


def joined(earlier: str | None, names: str) -> str:
    """Filters of all calls, each as GoogleTest takes it."""
    return " and ".join(filter(None, (earlier, names)))


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "receipt"
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        for packed in folder.glob("*.xz"):
            plain = packed.with_suffix("")
            with lzma.open(packed) as source, plain.open("wb") as target:
                shutil.copyfileobj(source, target)
            plain.chmod(0o755)
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.tests: dict[str, str] = {}
        self.good = True
        self.began = time.monotonic()

    def command(self, log: str, *command: object, seconds: int = 600, **environment: object) -> int:
        line = " ".join(str(word) for word in command)

        def say(text: str) -> None:
            print(f"gpu_check: after {time.monotonic() - self.began:.0f} s: {text}", flush=True)

        say(line[:100])
        with (self.out / f"{log}.log").open("a") as stream:
            print("$", line, file=stream, flush=True)
            try:
                code = subprocess.run(
                    [str(word) for word in command], stdout=stream, stderr=subprocess.STDOUT,
                    timeout=seconds, cwd=ROOT,
                    # Waiting threads of programs that run beside each other must not spin.
                    env=os.environ | {"PYTHONPATH": str(ROOT / "python"),
                                      "OMP_WAIT_POLICY": "passive"}
                    | {name: str(value) for name, value in environment.items()},
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = 124
            except FileNotFoundError as error:
                print(error, file=stream)
                code = 127
        say(f"{log}: exit status {code}")
        return code

    def gtest(self, names: str, shards: int = 1) -> None:
        def run(shard: int) -> Path:
            result = self.out / f"gpu_test_{shard}.json"
            self.command(f"gpu_test_{shard}", self.folder / "gpu_test", "--gtest_brief=1",
                         f"--gtest_filter={names}", f"--gtest_output=json:{result}",
                         GTEST_TOTAL_SHARDS=shards, GTEST_SHARD_INDEX=shard)  # fmt: skip
            return result

        with ThreadPoolExecutor(shards) as pool:
            results = list(pool.map(run, range(shards)))
        self.join("gpu_test", [f"gpu_test_{shard}" for shard in range(shards)])
        for result in results:
            if not result.exists():  # it crashed: nothing is known to have passed
                self.good = False
                continue
            for suite in json.loads(result.read_text())["testsuites"]:
                for test in suite["testsuite"]:
                    state = "failed" if test.get("failures") else "passed"
                    if test["result"] == "SKIPPED":
                        state = "skipped"
                    self.tests[f"{suite['name']}.{test['name']}"] = state
            result.unlink()  # 200 kB that the receipt repeats

    def join(self, log: str, parts: Iterable[str]) -> None:
        """Logs of what ran at the same time, one after the other."""
        with (self.out / f"{log}.log").open("a") as stream:
            for part in parts:
                path = self.out / f"{part}.log"
                stream.write(path.read_text())
                path.unlink()

    def pytest(self) -> int:
        library = ROOT / EXTENSION
        library.parent.mkdir(exist_ok=True)
        shutil.copy(self.folder / library.name, library)
        code = self.command("pytest", sys.executable, "-m", "pytest", "-v", "-m", "gpu",
                            "-p", "no:cacheprovider", *GPU_PYTHON_TESTS)  # fmt: skip
        text = (self.out / "pytest.log").read_text()
        for name, state in re.findall(r"^(\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)", text, re.M):
            self.tests[name] = {"PASSED": "passed", "SKIPPED": "skipped"}.get(state, "failed")
        return code

    def sanitizers(self, names: str) -> dict[str, str]:
        """All at once, in parts, which takes less time."""
        program = self.folder / "gpu_test"
        tests = len(listed_tests(program, names))
        if tests == 0:
            sys.exit(f"gpu_check: --again: got {names}, allowed: names of C++ tests")
        most = {"memcheck": 2, "racecheck": 4, "synccheck": 2, "initcheck": 2}
        shards = {tool: min(count, tests) for tool, count in most.items()}  # none without a test

        def run(tool: str, shard: int) -> int:
            return self.command(f"{tool}_{shard}", "compute-sanitizer", "--tool", tool,
                                "--error-exitcode", "9", program, "--gtest_brief=1",
                                f"--gtest_filter={names}", seconds=300,
                                GTEST_TOTAL_SHARDS=shards[tool], GTEST_SHARD_INDEX=shard)  # fmt: skip

        parts = [(tool, shard) for tool, count in shards.items() for shard in range(count)]
        with ThreadPoolExecutor(len(parts)) as pool:
            codes = dict(zip(parts, pool.map(lambda part: run(*part), parts), strict=True))
        self.join("sanitizers", [f"{tool}_{shard}" for tool, shard in parts])
        return {tool: sanitizer_state([codes[tool, shard] for shard in range(count)])
                for tool, count in shards.items()}  # fmt: skip

    def bench(self, log: str, *how: str) -> tuple[list[dict], float]:
        result = self.out / "bench.json"
        rows, copy = [], 0.0
        for shapes in (("--configs", "targets"), ("--thiek", SMALL)):
            self.command(log, self.folder / "sonicmoe", "bench", "--device", "cuda", *shapes,
                         "--ops", *how, "--json", result)  # fmt: skip
            if not result.exists():
                self.good = False
                continue
            report = json.loads(result.read_text())
            for config in report.get("configs", [{"config": "small", **report}]):
                copy = max(copy, config["copy_TBps"])
                for row in config["results"]:
                    rows.append({"config": config["config"], "thiek": config["layer"]["thiek"],
                                 **{key: row[key] for key in
                                    ("what", "ms", "mad_ms", "dense_bound_ms", "tflops")}})  # fmt: skip
            result.unlink()
        return rows, copy

    def errors(self) -> tuple[list[dict], dict | None]:
        result = self.out / "moe-cute.json"
        self.command("moe-cute", sys.executable, "benchmarks/moe-cute.py", "--thiek",
                     "24576,1536,256,128,8", "--repeats", "10", "--json", result)  # fmt: skip
        if not result.exists():
            self.good = False
            return [], None
        report = json.loads(result.read_text())
        rows = [{"config": "7B-n256", "tensor": name, "rel": rel}
                for name, rel in report["errors"].items()]  # fmt: skip
        result.unlink()
        return rows, report["results"]["total"]

    def dense(self, rows: list[dict]) -> list[dict]:
        """The dense bound's GEMMs by torch.bmm, each in thermal steady state too."""
        shapes = {row["config"]: row["thiek"] for row in rows}
        result = self.out / "dense_bound.json"
        arguments = [word for thiek in shapes.values()
                     for word in ("--thiek", ",".join(map(str, thiek)))]  # fmt: skip
        self.command("dense_bound", sys.executable, "benchmarks/dense_bound.py", *arguments,
                     "--json", result)  # fmt: skip
        if not result.exists():
            self.good = False
            return []
        measured = json.loads(result.read_text())
        result.unlink()
        return [{"config": config, **row} for config, row in zip(shapes, measured, strict=True)]

    def tests_part(self) -> dict:
        with ThreadPoolExecutor(1) as pool:  # beside the tests
            pytest = pool.submit(self.pytest)
            self.gtest(f"-{ALONE}", SHARDS)
            pytest_exit = pytest.result()
        self.gtest(ALONE)
        example = self.command("example", self.folder / Path(EXAMPLE).name)
        self.tests["examples::cuda_layer"] = "failed" if example else "passed"
        errors, python = self.errors()
        states = list(self.tests.values())
        summary = {state: states.count(state) for state in ("passed", "failed", "skipped")}
        self.good &= summary["failed"] == summary["skipped"] == 0 and summary["passed"] > 0
        self.good &= pytest_exit == 0
        print(f"gpu_check: {summary}")
        return {
            "tests": summary,
            "pytest_exit": pytest_exit,
            "errors": errors,
            "python": python,
            "kernels": cuda_kernels(self.folder / "sonicmoe", self.out / "info.json"),
            "test_names": self.tests,
        }

    def again(self, names: str, device: str) -> dict:
        """The tests part of an earlier call or of a receipt, with new results of these C++ tests,
        of those that must run alone and of all Python tests."""
        found = self.earlier("tests", device)
        self.good = True  # what failed there is among its tests
        with ThreadPoolExecutor(1) as pool:
            pytest = pool.submit(self.pytest)
            self.gtest(f"{names}{':' if '-' in names else '-'}{ALONE}", SHARDS)
            found["pytest_exit"] = pytest.result()
        self.gtest(ALONE)
        found["kernels"] = cuda_kernels(self.folder / "sonicmoe", self.out / "info.json")
        found["test_names"] |= self.tests
        states = list(found["test_names"].values())
        summary = {state: states.count(state) for state in ("passed", "failed", "skipped")}
        self.good &= summary["failed"] == summary["skipped"] == found["pytest_exit"] == 0
        print(f"gpu_check: {summary}, of them {len(self.tests)} again")
        return found | {"tests": summary, "tests_again": joined(found.get("tests_again"), names)}

    def sanitizers_again(self, names: str, device: str) -> dict:
        """The same of the sanitizers."""
        found = self.earlier("sanitizers", device)
        self.good = True  # what was not clean there is among its states
        earlier, again = found["sanitizer"], self.sanitizers_part(names)["sanitizer"]
        states = {tool: earlier[tool] if again[tool] == "clean" else again[tool] for tool in again}
        self.good &= set(states.values()) == {"clean"}
        names = joined(found.get("sanitizers_again"), names)
        return {"sanitizer": states, "sanitizers_again": names}

    def sanitizers_part(self, names: str = SANITIZED) -> dict:
        sanitizer = self.sanitizers(names)
        self.good &= set(sanitizer.values()) == {"clean"}
        print(f"gpu_check: {sanitizer}")
        return {"sanitizer": sanitizer}

    def bench_part(self, quick: bool) -> dict:
        rows, copy = ([], 0.0) if quick else self.bench("bench", "--repeats", "10")
        hot, _ = ([], 0.0) if quick else self.bench("bench_steady_state", "--steady-state", "100")
        dense = [] if quick else self.dense(hot)
        return {"copy_TBps": copy, "bench": rows, "steady_state": hot, "torch_bmm": dense}

    def earlier(self, part: str, device: str) -> dict:
        """What an earlier call for `part` found, or the receipt, on a device of this name."""
        path = self.folder / f"{part}.json"
        if path.exists():
            found = json.loads(path.read_text())
        else:
            path = UNTIMED
            receipt = json.loads(path.read_text())
            found = {key: receipt[key] for key in ("device", *PARTS[part])} | {"good": True}
        return self.on_device(path, found, device)

    def done(self, part: str, device: str) -> dict:
        """What the call for `part` found with these programs."""
        path = self.folder / f"{part}.json"
        if not path.exists():
            sys.exit(f"gpu_check: {path}: got none, allowed: what --part {part} left")
        found = json.loads(path.read_text())
        of, wanted = found.get("digest"), self.manifest["digest"]
        if of != wanted:
            sys.exit(f"gpu_check: {path}: got digest {of}, allowed: {wanted}")
        return self.on_device(path, found, device)

    def on_device(self, path: Path, found: dict, device: str) -> dict:
        """`found` without what was true of that call alone; its verdict counts."""
        if found["device"] != device:
            sys.exit(f"gpu_check: {path.name}: got {found['device']}, allowed: {device}")
        self.good &= found["good"]
        of_the_call = {"good", "digest", "date", "driver"}
        return {key: value for key, value in found.items() if key not in of_the_call}

    def receipt(self, part: str, quick: bool, again: str = "") -> int:
        """`part`: "tests" and "sanitizers" leave FOLDER/PART.json, from which "bench" completes the
        receipt; "all" does everything. `again`: C++ tests whose results replace those of
        FOLDER/tests.json, or of the receipt if that is not there."""
        smi = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        device, driver = smi.splitlines()[0].split(", ")
        known = {"date": datetime.date.today().isoformat(), "device": device, "driver": driver}
        others = {"tests": self.tests_part, "sanitizers": self.sanitizers_part}
        if again:
            others["tests"] = lambda: self.again(again, device)
            others["sanitizers"] = lambda: self.sanitizers_again(again, device)
        if part in others:
            known |= others[part]() | {"good": self.good, "digest": self.manifest["digest"]}
            (self.folder / f"{part}.json").write_text(json.dumps(known, indent=1) + "\n")
        else:
            for other, run in others.items():
                known |= run() if part == "all" else self.done(other, device)
            receipt = self.manifest | known | self.bench_part(quick)
            timed = not quick and re.search(r"\bH200\b", device) is not None
            if timed and (weak := weak_bound(receipt["bench"], receipt["python"])):
                print(f"gpu_check: {weak}")
                self.good = False
            name = (RECEIPT if timed else UNTIMED).name
            (self.out / name).write_text(json.dumps(receipt, indent=1) + "\n")
        for log in self.out.glob("*.log"):
            log.write_text(without_paths(log.read_text(errors="replace"), self.folder))
        print(f"gpu_check: {part} {'good' if self.good else 'NOT good'}, in {self.out}")
        return 0 if self.good else 1


# verify


def changed_kernels(build: dict[str, str], receipt: dict[str, str]) -> list[str]:
    """Kernels whose machine code the receipt lacks, or does not have under a name it knows."""
    known = set(receipt.values())
    return [name for name, code in build.items()
            if code not in known or code != receipt.get(name, code)]  # fmt: skip


def not_in_receipt(
    names: list[str], known: set[str], renames: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    """Names that the receipt lacks even under the old name, and renames that no name needs."""
    lacking, needed = [], []
    free = known - set(names)  # a name of the receipt stands for one name of the build
    for name in names:
        if name in known:
            continue
        old = name
        for rename in renames:
            if rename[0] in old:
                old = old.replace(rename[0], rename[1])
                needed.append(rename)
        if old in free:
            free.remove(old)
        else:
            lacking.append(name)
    return lacking, [rename for rename in renames if rename not in needed]


def problems(build: Path, path: Path | None = None) -> list[str]:
    """Why the receipt, h200.json unless named, does not cover this build."""
    path = path or RECEIPT
    if not path.exists():
        return [f"there is no {path.relative_to(ROOT)}"]
    receipt = json.loads(path.read_text())
    found = []
    if receipt["digest"] != digest(build):
        kernels = machine_code.kernels(build)
        changed = changed_kernels(kernels, receipt["machine_code"])
        if changed:
            found.append("sources changed since the receipt, and the machine code of "
                         f"{len(changed)} of {len(kernels)} kernels")  # fmt: skip
            found += [f"machine code of {name}: not the receipt's" for name in changed]
        else:
            print("gpu_check: sources changed since the receipt; "
                  f"the machine code of all {len(kernels)} kernels is equal")  # fmt: skip
    passed = {name for name, state in receipt["test_names"].items() if state == "passed"}
    renamed = json.loads(RENAMED.read_text()) if RENAMED.exists() else {}
    for what, names, known, state in (
        ("test", listed_tests(build / "bin/gpu_test"), passed, "passed"),
        ("kernel", cuda_kernels(build / "bin/sonicmoe", build / "kernels.json"),
         set(receipt["kernels"]), "in the receipt"),
    ):  # fmt: skip
        lacking, unused = not_in_receipt(names, known, renamed.get(f"{what}s", []))
        found += [f"{what} {name}: not {state}" for name in lacking]
        found += [f"{RENAMED.name}: no {what} needs {new} -> {old}" for new, old in unused]
    # Of the Python tests it is not known here which there are.
    if code := receipt["pytest_exit"]:
        found.append(f"the Python tests ended with exit status {code}")
    found += [f"test {name}: {state}" for name, state in receipt["test_names"].items()
              if "::" in name and state != "passed"]  # fmt: skip
    found += [f"{tool}: {state}" for tool, state in receipt["sanitizer"].items()
              if state != "clean"]  # fmt: skip
    if path != RECEIPT:
        return found
    if weak := weak_bound(receipt["bench"], receipt["python"]):
        found.append(weak)
    timed, hot = ({(row["config"], row["what"]) for row in receipt.get(key, [])}
                  for key in ("bench", "steady_state"))  # fmt: skip
    found += [
        f"steady-state benchmark: {' '.join(row)}: not measured" for row in sorted(timed - hot)
    ]
    dense = {row["config"] for row in receipt.get("torch_bmm", [])}
    found += [f"torch.bmm: {config}: not measured"
              for config in sorted({config for config, _ in timed} - dense)]  # fmt: skip
    return found


def verify(build: Path) -> int:
    found, path = problems(build), RECEIPT
    if found and UNTIMED.exists():
        found, path = min(
            (found, path), (problems(build, UNTIMED), UNTIMED), key=lambda x: len(x[0])
        )
    if not found:
        print(f"gpu_check: {path.relative_to(ROOT)} covers this build")
        return 0
    print(f"gpu_check: {path.relative_to(ROOT)} does not cover this build:")
    shown = found[:10] + [f"... and {len(found) - 10} more"] * (len(found) > 10)
    print("\n".join(f"gpu_check: {problem}" for problem in shown))
    if not PENDING.exists():
        return 1
    last = output("git", "log", "-1", "--format=%H", "--", str(PENDING), cwd=ROOT).strip()
    age = int(output("git", "rev-list", "--count", f"{last}..HEAD", cwd=ROOT)) if last else 0
    name = PENDING.relative_to(ROOT)
    if age > MAX_PENDING_COMMITS:
        print(f"gpu_check: {name} is {age} commits old, allowed: {MAX_PENDING_COMMITS}")
        return 1
    print(f"gpu_check: {name} ({age} commits old) says so too:\n{PENDING.read_text()}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("pack")
    one.add_argument("build", type=Path)
    one.add_argument("folder", type=Path)
    one = commands.add_parser("run")
    one.add_argument("folder", type=Path)
    one.add_argument("--quick", action="store_true", help="without the benchmark")
    one.add_argument(
        "--part",
        choices=("all", "tests", "sanitizers", "bench"),
        default="all",
        help="the first two leave FOLDER/PART.json; bench wants both",
    )
    one.add_argument(
        "--again",
        default="",
        metavar="FILTER",
        help="with --part tests or sanitizers: these C++ tests alone, those of kernels that changed; "
        f"FOLDER/PART.json has the rest, or {UNTIMED.name}",
    )
    one = commands.add_parser("verify")
    one.add_argument("build", type=Path)
    options = parser.parse_args()
    if options.command == "pack":
        return pack(options.build.resolve(), options.folder.resolve())
    if options.command == "run":
        return Run(options.folder.resolve()).receipt(options.part, options.quick, options.again)
    return verify(options.build.resolve())


if __name__ == "__main__":
    sys.exit(main())
