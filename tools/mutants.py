#!/usr/bin/env python3
"""Breaks the sources in one way at a time and shows that each turns a test red.

Works on a copy of the tree in build-mutants. A test counts as red if it fails with the mutant and
passes without. Exit code 1 if a mutant survives, or if its pattern is not found exactly once: then
the code has moved on, and the pattern has to follow.

Usage: tools/mutants.py [WORD...]    only the mutants whose name contains a WORD
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build-mutants" / "tree"
BUILD = TREE / "build"
UNCHANGED = BUILD / "unchanged"  # the test programs without a mutant
COPIED = ("CMakeLists.txt", "cmake", "include", "src", "testkit", "tests")


@dataclass
class Mutant:
    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "router: ties of groups go to the higher one",
        "src/cpu/scored_routing.h",
        "better += a > b || (a == b && other < g);",
        "better += a > b || (a == b && other > g);",
    ),
    Mutant(
        "router: a selection bias in the weights",
        "src/cpu/scored_routing.h",
        "s.values[e] = d.selection_bias ? math::add(by[e], selection_bias[e]) : by[e];",
        "s.values[e] = s.p[e] = d.selection_bias ? math::add(by[e], selection_bias[e]) : by[e];",
    ),
    Mutant(
        "router: groups by the wrong score",
        "src/cpu/scored_routing.h",
        "return two ? math::add(best[0], best[1]) : best[0];",
        "return best[0];",
    ),
    Mutant(
        "router: a bias after the rounding",
        "src/cpu/router_gemm.cpp",
        "scratch.tile[i * nj + j] += p.bias[j0 + j];",
        "scratch.tile[i * nj + j] = to_float(from_float<Out>(scratch.tile[i * nj + j])) + "
        "p.bias[j0 + j];",
    ),
    Mutant(
        "router: a renormalisation without its gradient",
        "src/math/router_score.h",
        "    if (!renormalize) return h;",
        "    return h;",
    ),
    Mutant(
        "losses: a masked token counts",
        "src/cpu/aux_loss.cpp",
        "return !d.masked || a.token_mask[t] != 0;",
        "return true || !d.masked || a.token_mask[t] != 0;",
    ),
    Mutant(
        "router: the choice forgets its bias",
        "src/cpu/scored_routing.h",
        "d.selection_bias ? math::add(by[e], selection_bias[e]) : by[e];",
        "by[e];",
    ),
    Mutant(
        "router: eps left out of a gradient",
        "src/math/router_score.h",
        "return divisor == 0.0f ? 0.0f : div(sub(h, inner), divisor);",
        "return divisor == 0.0f ? 0.0f : div(sub(h, inner), sub(divisor, eps));",
    ),
    Mutant(
        "router: a sigmoid's gradient subtracts a sum",
        "src/cpu/score_grad.cpp",
        "return d.plain() || d.over_top_k() || d.reaches_all_experts();",
        "return true;",
    ),
    Mutant(
        "router: the gradient of an expert's scale without the other scale",
        "src/cpu/score_grad.cpp",
        "math::fma(g, weights.scaled(w, 1.0f), a.dexpert_scale[e]);",
        "math::fma(g, w, a.dexpert_scale[e]);",
    ),
    Mutant(
        "router: no bias in the logits",
        "src/cpu/router_gemm.cpp",
        "i < ni && p.bias != nullptr; ++i",
        "i < 0; ++i",
    ),
    Mutant(
        "gate and up swapped",
        "src/cpu/grouped_gemm.h",
        "return inside(half * width, 2 * width, 1);",
        "return inside((1 - half) * width, 2 * width, 1);",
    ),
    Mutant(
        "alternating gates and ups read as halves",
        "src/cpu/grouped_gemm.h",
        "if (d.alternates()) return f(fn, std::integral_constant<int, 2>{});",
        "",
    ),
    Mutant(
        "no step of Newton's",
        "src/math/exp.h",
        "return fma(y, fma(-d, y, 1.0f), y);",
        "return y;",
    ),
    Mutant(
        "a gate may be any number",
        "src/math/activation.h",
        "x = at_least(x, -86.6f);",
        "x = at_least(x, -100.0f);",
    ),
    Mutant(
        "a clamp without its zero gradient",
        "src/math/activation.h",
        "return {v * u, gate > limit ? 0.0f : da * u * slope, fabsf(up) > limit ? 0.0f : da * v};",
        "return {v * u, gate > limit ? 0.0f : da * u * slope, da * v};",
    ),
    Mutant(
        "A' without the score s",
        "src/cpu/down_proj_dgrad.cpp",
        "scaled_act[j] = from_float<T>(score * r.act);",
        "scaled_act[j] = from_float<T>(r.act);",
    ),
    Mutant(
        "dW of an empty expert not zeroed",
        "src/cpu/down_proj_wgrad.cpp",
        "if (begin == end) std::fill_n(scratch.tile, ni * nj, 0.0f);",
        "if (begin == end) return;",
    ),
    Mutant(
        "ties go to the higher expert",
        "src/cpu/routing.h",
        "for (; at > 0 && values[e] > best[at - 1]; --at) {",
        "for (; at > 0 && values[e] >= best[at - 1]; --at) {",
    ),
    Mutant(
        "no b2 term in dS",
        "src/cpu/bias_grad.cpp",
        "a.row_dscores[r] += dot(dout, b2, d.hidden);",
        "(void)dot(dout, b2, d.hidden);",
    ),
    Mutant(
        "last row of an expert left out",
        "src/cpu/parallel.h",
        "f(thread, RowBlock{expert, begins[expert] + begin, std::min(size, rows - begin)},",
        "f(thread, RowBlock{expert, begins[expert] + begin, std::min(size, rows - begin - 1)},",
    ),
    Mutant(
        "a score on the wrong side of the bias",
        "src/cpu/down_proj.cpp",
        "    case ScoreAt::before_down:  // s A W2^T: the product is linear in A\n",
        "    case ScoreAt::before_down:\n"
        "      for (std::int64_t j = 0; bias && j < n; ++j) y[j] += to_float(bias[j]);\n"
        "      bias = nullptr;\n",
    ),
    Mutant(
        "a score in b2's gradient where b2 gets none",
        "src/cpu/bias_grad.cpp",
        "return d.scores_bias() ? a.row_scores[r] : 1.0f;",
        "return d.scored() ? a.row_scores[r] : 1.0f;",
    ),
    Mutant(
        "a tail row read",
        "src/cpu/down_proj_wgrad.cpp",
        "const std::int64_t end = row_ends(a)[expert];",
        "const std::int64_t end = expert + 1 < d.experts ? a.offsets[expert + 1] : d.rows;",
    ),
    Mutant(
        "a padded row counted",
        "src/core/segments.h",
        "return args.ends != nullptr ? args.ends : args.offsets + 1;",
        "return args.offsets + 1;",
    ),
    Mutant(
        "rows of no expert left as they are",
        "src/cpu/zero_tail.cpp",
        "  clear(from, d.rows);",
        "",
    ),
    Mutant(
        "the selection bias of an expert with the mean count moves",
        "src/cpu/update_selection_bias.cpp",
        "    if (count != all) a.selection_bias",
        "    a.selection_bias",
    ),
    Mutant(
        "the gradient of an id that repeats keeps its last entry alone",
        "src/cpu/score_grad.cpp",
        "sum = d.takes_ids() ? sum + gradient : gradient;",
        "sum = gradient;",
    ),
    Mutant(
        "loaded experts last in the order for weight gradients",
        "src/cpu/metadata.cpp",
        "return mine > other ||",
        "return mine < other ||",
    ),
    Mutant(
        "the router's terms and dX's rows in one sum",
        "src/cpu/aggregate.cpp",
        "true, n, routers);",
        "true, n, sum);",
    ),
    Mutant(
        "the layer does not add to dW1 and dW2",
        "src/core/layer_plan.cpp",
        "experts.desc = d.grouped();",
        "experts.desc = d.grouped(), experts.desc.accumulate_weight_grads = false;",
    ),
    Mutant(
        "dX is left out where dW1 is not wanted",
        "src/core/experts_plan.cpp",
        'seq->run_for(args.dx_rows, "up_proj_dgrad"',
        'seq->run_for(args.dw1, "up_proj_dgrad"',
    ),
    Mutant(
        "dH in the workspace where the caller brings memory",
        "src/core/experts_plan.cpp",
        "if (!desc.dpreact_in_workspace) return args.dpreact;",
        "",
    ),
    Mutant(
        "H is made again with the gate's bias in place of the up rows'",
        "src/core/experts_plan.cpp",
        "            .b1_up = args.b1_up,\n            .preact = dh,",
        "            .b1_up = args.b1,\n            .preact = dh,",
    ),
    Mutant(
        "forward writes an H that nobody keeps",
        "src/core/experts_plan.cpp",
        "up_proj_desc(desc.keeps_preact())",
        "up_proj_desc(!desc.inference)",
    ),
    Mutant(
        "a call runs operations that it was not asked for",
        "src/core/sequence.h",
        "if (!wants_next()) return;",
        "(void)wants_next();",
    ),
    Mutant(
        "a field's text is not read back",
        "src/core/layer_text.cpp",
        '*out = text == "true";',
        '*out = text != "true";',
    ),
    Mutant(
        "dH of the up rows written before their H is read",
        "src/cpu/down_proj_dgrad.cpp",
        "const float g = to_float(h[j * kStep]);",
        "const float g = to_float(h[j * kStep]); if (Fn::kIsGlu) dh[j * kStep + up] = T{};",
    ),
    Mutant(
        "token rounding: a tie goes up",
        "src/math/rounding.h",
        "return c.ceil - c.count < c.count - c.floor;",
        "return c.ceil - c.count <= c.count - c.floor;",
    ),
    Mutant(
        "token rounding: more rows than tokens",
        "src/math/rounding.h",
        "ceil <= tokens};",
        "ceil <= tokens + 1};",
    ),
]


def copy_tree():
    """Copies what differs, so that an earlier build is continued."""
    for name in COPIED:
        sources = [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*")
        wanted = {path.relative_to(ROOT) for path in sources if path.is_file()}
        for path in wanted:
            copy, data = TREE / path, (ROOT / path).read_bytes()
            if not copy.is_file() or copy.read_bytes() != data:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(data)
        for copy in (TREE / name).rglob("*") if (TREE / name).is_dir() else ():
            if copy.is_file() and copy.relative_to(TREE) not in wanted:
                copy.unlink()


def build():
    environment = {**os.environ, "CCACHE_BASEDIR": str(TREE)}
    commands: list[list[str | Path]] = [["ninja", "-C", BUILD]]
    if not (BUILD / "build.ninja").is_file():
        launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
        commands.insert(
            0,
            [
                "cmake",
                "-G",
                "Ninja",
                "-S",
                TREE,
                "-B",
                BUILD,
                "-DSONICMOE_CLI=OFF",
                "-DSONICMOE_CUDA=OFF",
                *launcher,
            ],
        )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}mutants: this does not build")


def tests():
    """Command and environment of every test program by name, as ctest would run it."""
    shown = subprocess.run(["ctest", "--test-dir", BUILD, "--show-only=json-v1"],
                           capture_output=True, text=True, check=True)  # fmt: skip
    found = {}
    for test in json.loads(shown.stdout)["tests"]:
        properties = {entry["name"]: entry["value"] for entry in test["properties"]}
        variables = dict(line.split("=", 1) for line in properties.get("ENVIRONMENT", []))
        environment = {**os.environ, **variables, "GTEST_FAIL_FAST": "1"}
        found[test["name"]] = test["command"], environment
    return found or sys.exit("mutants: ctest knows no tests")


def run(name, command, environment, running, stop):
    """The name of a test program and those of its tests that fail; nothing if all pass."""
    if stop.is_set():
        return []
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        running.append(process)
        if stop.is_set():  # in between
            process.kill()
        try:
            code = process.wait(timeout=300)
        except subprocess.TimeoutExpired:  # red too: without a mutant it is half a minute
            process.kill()
            code = process.wait()
        if code == 0 or stop.is_set():
            return []
        output.seek(0)
        failed = re.findall(r"^\[  FAILED  \] ([\w./]+)(?:,| \()", output.read(), re.MULTILINE)
    return [name, *dict.fromkeys(failed)]


def failing_tests():
    """What run() says of the first test program that fails; the others are not waited for."""
    running: list[subprocess.Popen] = []
    stop = threading.Event()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(run, name, command, environment, running, stop)
            for name, (command, environment) in tests().items()
        ]
        for job in as_completed(jobs):
            if red := job.result():
                stop.set()
                for process in running:
                    process.kill()
                return red
    return []


def fails_unchanged(red):
    """Whether these tests also fail without a mutant: then they say nothing about one."""
    program, *names = red
    _, environment = tests()[program]
    command = [UNCHANGED / program, f"--gtest_filter={':'.join(names) or '*'}"]
    return subprocess.run(command, env=environment, capture_output=True).returncode != 0


def main(words):
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    if not chosen:
        sys.exit(f"mutants: none of {[m.name for m in MUTANTS]} contains {words}")
    for mutant in chosen:
        count = (ROOT / mutant.file).read_text().count(mutant.old)
        if count != 1:
            sys.exit(
                f"mutants: {mutant.name}: pattern found {count} times in {mutant.file}, "
                f"expected once:\n{mutant.old}"
            )
    copy_tree()
    build()
    shutil.rmtree(UNCHANGED, ignore_errors=True)
    shutil.copytree(BUILD / "bin", UNCHANGED)

    survivors, known = 0, set()
    for mutant in chosen:
        began = time.monotonic()
        file = TREE / mutant.file
        text = file.read_text()
        file.write_text(text.replace(mutant.old, mutant.new))
        try:
            build()
            red = failing_tests()
        finally:
            file.write_text(text)
        if red and tuple(red) not in known and fails_unchanged(red):
            sys.exit(f"mutants: the unchanged tree already fails {red}")
        known.add(tuple(red))
        survivors += not red
        verdict = f"red: {', '.join(red[:3])}" if red else "SURVIVED: no test notices"
        print(f"{mutant.name:40} {verdict}  ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"mutants: {len(chosen) - survivors} of {len(chosen)} turn a test red")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
