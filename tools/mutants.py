#!/usr/bin/env python3
"""Breaks the sources in one way at a time and shows that each turns a test red.

Works on copies of the tree in build-mutants, two at a time: a mutant mostly waits for one compiler.
The tests that a mutant names must fail with it and pass without. Exit code 1 if a mutant survives,
or if its pattern is not found exactly once: then the code has moved on, and the pattern has to
follow.

Usage: tools/mutants.py [WORD...]    only the mutants whose name contains a WORD
"""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
TREES = [ROOT / "build-mutants" / f"tree-{i}" for i in range(2)]
UNCHANGED = ROOT / "build-mutants" / "unchanged"  # the test programs without a mutant
COPIED = ("CMakeLists.txt", "cmake", "include", "src", "testkit", "tests")


@dataclass
class Mutant:
    name: str
    test: str  # who notices: "PROGRAM FILTER", the fewer tests the better
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "router: ties of groups go to the higher one",
        "layer_test Cases/Layer.AgreesWithTheOracle/router_deepseek_v3_*",
        "src/cpu/scored_routing.h",
        "better += a > b || (a == b && other < g);",
        "better += a > b || (a == b && other > g);",
    ),
    Mutant(
        "router: a selection bias in the weights",
        "layer_test Cases/Layer.AgreesWithTheOracle/router_sigmoid_*",
        "src/cpu/scored_routing.h",
        "s.values[e] = d.selection_bias ? math::add(by[e], selection_bias[e]) : by[e];",
        "s.values[e] = s.p[e] = d.selection_bias ? math::add(by[e], selection_bias[e]) : by[e];",
    ),
    Mutant(
        "router: groups by the wrong score",
        "layer_test Cases/Layer.AgreesWithTheOracle/router_deepseek_v3_*",
        "src/cpu/scored_routing.h",
        "return two ? math::add(best[0], best[1]) : best[0];",
        "return best[0];",
    ),
    Mutant(
        "router: a bias after the rounding",
        "ops_test Kernels/ExactRouterGemm.BiasAndFloats/*",
        "src/cpu/router_gemm.cpp",
        "scratch.tile[i * nj + j] += p.bias[j0 + j];",
        "scratch.tile[i * nj + j] = to_float(from_float<Out>(scratch.tile[i * nj + j])) + "
        "p.bias[j0 + j];",
    ),
    Mutant(
        "router: a renormalisation without its gradient",
        "layer_test Cases/Layer.AgreesWithTheOracle/router_sigmoid_*",
        "src/math/router_score.h",
        "    if (!renormalize) return h;",
        "    return h;",
    ),
    Mutant(
        "losses: a masked token counts",
        "ops_test AuxLoss.TwoTimesRule",
        "src/cpu/aux_loss.cpp",
        "return !d.masked || a.token_mask[t] != 0;",
        "return true || !d.masked || a.token_mask[t] != 0;",
    ),
    Mutant(
        "router: the choice forgets its bias",
        "layer_test Cases/Layer.AgreesWithTheOracle/router_deepseek_v3_*",
        "src/cpu/scored_routing.h",
        "d.selection_bias ? math::add(by[e], selection_bias[e]) : by[e];",
        "by[e];",
    ),
    Mutant(
        "router: eps left out of a gradient",
        "layer_test Cases/Layer.AgreesWithTheOracle/router_eps_*",
        "src/math/router_score.h",
        "{ return weight(slope, divisor); }",
        "{ return weight(slope, sub(divisor, eps)); }",
    ),
    Mutant(
        "router: a sigmoid's gradient subtracts a sum",
        "layer_test Cases/Layer.AgreesWithTheOracle/router_sigmoid_*",
        "src/cpu/score_grad.cpp",
        "return d.plain() || d.over_top_k() || d.reaches_all_experts();",
        "return true;",
    ),
    Mutant(
        "router: the gradient of an expert's scale without the other scale",
        "gradient_test Cases/LayerGradient.AgreesWithFiniteDifferences/scaled_softmax",
        "src/cpu/score_grad.cpp",
        "math::fma(g, weights.scaled(w, 1.0f), a.dexpert_scale[e]);",
        "math::fma(g, w, a.dexpert_scale[e]);",
    ),
    Mutant(
        "router: no bias in the logits",
        "layer_test Cases/Layer.AgreesWithTheOracle/router_gpt_oss_*",
        "src/cpu/router_gemm.cpp",
        "i < ni && p.bias != nullptr; ++i",
        "i < 0; ++i",
    ),
    Mutant(
        "gate and up swapped",
        "layer_test Layers.RandomOnesAgreeWithTheOracle",
        "src/cpu/grouped_gemm.h",
        "return inside(half * width, 2 * width, 1);",
        "return inside((1 - half) * width, 2 * width, 1);",
    ),
    Mutant(
        "alternating gates and ups read as halves",
        "layer_test Layers.RandomOnesAgreeWithTheOracle",
        "src/cpu/grouped_gemm.h",
        "if (d.alternates()) return f(fn, std::integral_constant<int, 2>{});",
        "",
    ),
    Mutant(
        "no step of Newton's",
        "activation_test Activations.ObjectsAgreeWithTheTable",
        "src/math/exp.h",
        "return fma(y, fma(-d, y, 1.0f), y);",
        "return y;",
    ),
    Mutant(
        "a gate may be any number",
        "core_test Activation.ByNewtonIsTheSameFunction",
        "src/math/activation.h",
        "x = at_least(x, -86.6f);",
        "x = at_least(x, -100.0f);",
    ),
    Mutant(
        "a clamp without its zero gradient",
        "core_test Activation.ParametersAgreeWithFp64",
        "src/math/activation.h",
        "fabsf(up) > limit ? 0.0f : da * f.value};",
        "da * f.value};",
    ),
    Mutant(
        "A' without the score s",
        "layer_test Cases/Layer.AgreesWithTheOracle/*",
        "src/cpu/down_proj_dgrad.cpp",
        "scaled_act[j] = from_float<T>(score * r.act);",
        "scaled_act[j] = from_float<T>(r.act);",
    ),
    Mutant(
        "dW of an empty expert not zeroed",
        "ops_test Kernels/ExactWeightGradient.OverwritesOrAccumulates/*",
        "src/cpu/down_proj_wgrad.cpp",
        "if (begin == end) std::fill_n(scratch.tile, ni * nj, 0.0f);",
        "if (begin == end) return;",
    ),
    Mutant(
        "ties go to the higher expert",
        "ops_test TopK.*",
        "src/cpu/routing.h",
        "for (; at > 0 && values[e] > best[at - 1]; --at) {",
        "for (; at > 0 && values[e] >= best[at - 1]; --at) {",
    ),
    Mutant(
        "no b2 term in dS",
        "layer_test Cases/Layer.AgreesWithTheOracle/*bias*",
        "src/cpu/bias_grad.cpp",
        "a.row_dscores[r] += dot(dout, b2, d.hidden);",
        "(void)dot(dout, b2, d.hidden);",
    ),
    Mutant(
        "last row of an expert left out",
        "layer_test Layers.RandomOnesAgreeWithTheOracle",
        "src/cpu/parallel.h",
        "f(thread, RowBlock{expert, begins[expert] + begin, std::min(size, rows - begin)},",
        "f(thread, RowBlock{expert, begins[expert] + begin, std::min(size, rows - begin - 1)},",
    ),
    Mutant(
        "a score on the wrong side of the bias",
        "layer_test Cases/Layer.AgreesWithTheOracle/rows_*bias*",
        "src/cpu/down_proj.cpp",
        "    case ScoreAt::before_down:  // s A W2^T: the product is linear in A\n",
        "    case ScoreAt::before_down:\n"
        "      for (std::int64_t j = 0; bias && j < n; ++j) y[j] += to_float(bias[j]);\n"
        "      bias = nullptr;\n",
    ),
    Mutant(
        "a score in b2's gradient where b2 gets none",
        "layer_test Cases/Layer.AgreesWithTheOracle/rows_*bias*",
        "src/cpu/bias_grad.cpp",
        "return d.scores_bias() ? a.row_scores[r] : 1.0f;",
        "return d.scored() ? a.row_scores[r] : 1.0f;",
    ),
    Mutant(
        "a tail row read",
        "ops_test Kernels/ExactWeightGradient.OverwritesOrAccumulates/*",
        "src/cpu/down_proj_wgrad.cpp",
        "const std::int64_t end = row_ends(a)[expert];",
        "const std::int64_t end = expert + 1 < d.experts ? a.offsets[expert + 1] : d.rows;",
    ),
    Mutant(
        "a padded row counted",
        "layer_test Cases/Layer.AgreesWithTheOracle/rows_*tile_counts*",
        "src/core/segments.h",
        "return args.ends != nullptr ? args.ends : args.offsets + 1;",
        "return args.offsets + 1;",
    ),
    Mutant(
        "rows of no expert left as they are",
        "layer_test Cases/Layer.AgreesWithTheOracle/*",
        "src/cpu/zero_tail.cpp",
        "  clear(from, d.rows);",
        "",
    ),
    Mutant(
        "the selection bias of an expert with the mean count moves",
        "ops_test UpdateSelectionBias.*",
        "src/cpu/update_selection_bias.cpp",
        "    if (count != all) a.selection_bias",
        "    a.selection_bias",
    ),
    Mutant(
        "the gradient of an id that repeats keeps its last entry alone",
        "layer_test Cases/Layer.AgreesWithTheOracle/input_*",
        "src/cpu/score_grad.cpp",
        "sum = d.takes_ids() ? sum + gradient : gradient;",
        "sum = gradient;",
    ),
    Mutant(
        "loaded experts last in the order for weight gradients",
        "ops_test Metadata.PropertiesOf*",
        "src/cpu/metadata.cpp",
        "return mine > other ||",
        "return mine < other ||",
    ),
    Mutant(
        "the router's terms and dX's rows in one sum",
        "ops_test Aggregate.RoutersPart*",
        "src/cpu/aggregate.cpp",
        "true, n, routers);",
        "true, n, sum);",
    ),
    Mutant(
        "the layer does not add to dW1 and dW2",
        "layer_test Layers.WeightGradientsInFp32AndAccumulated",
        "src/core/layer_plan.cpp",
        "experts.desc = d.grouped();",
        "experts.desc = d.grouped(), experts.desc.accumulate_weight_grads = false;",
    ),
    Mutant(
        "dX is left out where dW1 is not wanted",
        "layer_test Layers.OnlyWantedGradientsAreMade",
        "src/core/experts_plan.cpp",
        'seq->run_for(args.dx_rows, "up_proj_dgrad"',
        'seq->run_for(args.dw1, "up_proj_dgrad"',
    ),
    Mutant(
        "dH in the workspace where the caller brings memory",
        "memory_test Memory.DpreactInTheCallersMemory",
        "src/core/experts_plan.cpp",
        "if (!desc.dpreact_in_workspace) return args.dpreact;",
        "",
    ),
    Mutant(
        "H is made again with the gate's bias in place of the up rows'",
        "recompute_test Recompute.OnlyWantedGradients",
        "src/core/experts_plan.cpp",
        "            .b1_up = args.b1_up,\n            .preact = dh,",
        "            .b1_up = args.b1,\n            .preact = dh,",
    ),
    Mutant(
        "forward writes an H that nobody keeps",
        "recompute_test Recompute.OnlyWantedGradients",
        "src/core/experts_plan.cpp",
        "up_proj_desc(desc.keeps_preact())",
        "up_proj_desc(!desc.inference)",
    ),
    Mutant(
        "a call runs operations that it was not asked for",
        "plans_test Plans.OperationsThatAreNotWantedDoNotRun",
        "src/core/sequence.h",
        "if (!wants_next()) return;",
        "(void)wants_next();",
    ),
    Mutant(
        "a field's text is not read back",
        "core_test LayerText.*",
        "src/core/layer_text.cpp",
        '*out = text == "true";',
        '*out = text != "true";',
    ),
    Mutant(
        "dH of the up rows written before their H is read",
        "layer_test Layers.DpreactMayTakeThePlaceOfPreact",
        "src/cpu/down_proj_dgrad.cpp",
        "const float g = to_float(h[j * kStep]);",
        "const float g = to_float(h[j * kStep]); if (Fn::kIsGlu) dh[j * kStep + up] = T{};",
    ),
    Mutant(
        "token rounding: a tie goes up",
        "token_rounding_test TokenRounding.TenThousandRandomCases*",
        "src/math/rounding.h",
        "return c.ceil - c.count < c.count - c.floor;",
        "return c.ceil - c.count <= c.count - c.floor;",
    ),
    Mutant(
        "token rounding: more rows than tokens",
        "token_rounding_test TokenRounding.TenThousandRandomCases*",
        "src/math/rounding.h",
        "ceil <= tokens};",
        "ceil <= tokens + 1};",
    ),
    Mutant(
        "token_dispatch: tokens counted as pairs",
        "ops_test TokenDispatch.*",
        "src/cpu/token_dispatch.cpp",
        "++pairs[rank];",
        "pairs[rank] += n == 0;",
    ),
    Mutant(
        "send_rows: places without a row written",
        "ops_test SendRows.*",
        "src/cpu/send_rows.cpp",
        "std::min<std::int64_t>(a.counts[rank], d.tokens)",
        "d.tokens",
    ),
]


def copy_to(tree: Path):
    """Copies what differs, so that an earlier build is continued."""
    for name in COPIED:
        sources = [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*")
        wanted = {path.relative_to(ROOT) for path in sources if path.is_file()}
        for path in wanted:
            copy, data = tree / path, (ROOT / path).read_bytes()
            if not copy.is_file() or copy.read_bytes() != data:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(data)
        for copy in (tree / name).rglob("*") if (tree / name).is_dir() else ():
            if copy.is_file() and copy.relative_to(tree) not in wanted:
                copy.unlink()


def build(tree: Path, *targets: str):
    environment = {**os.environ, "CCACHE_BASEDIR": str(tree)}
    folder = tree / "build"
    commands: list[list[str | Path]] = [["ninja", "-C", folder, *targets]]
    if not (folder / "build.ninja").is_file():
        options = ["-DSONICMOE_CLI=OFF", "-DSONICMOE_CUDA=OFF"]
        if shutil.which("ccache"):
            options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        commands.insert(0, ["cmake", "-G", "Ninja", "-S", tree, "-B", folder, *options])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}mutants: this does not build")


def failing_tests(program: Path, only: str) -> list[str]:
    """Those of the tests `only` (a filter) that fail, or how the program ended without naming one."""
    environment = os.environ | {"GTEST_FAIL_FAST": "1", "OMP_WAIT_POLICY": "passive"}
    command: list[str | Path] = [program, f"--gtest_filter={only}"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:  # red too: without a mutant it is half a minute
        return [f"{program.name} is still running after 300 s"]
    if "Running 0 tests" in done.stdout:
        sys.exit(f"mutants: {program.name} has no test {only}")
    failed = re.findall(r"^\[  FAILED  \] ([\w./]+)(?:,| \()", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        return [f"{program.name} ends with {done.returncode}"]
    return list(dict.fromkeys(failed))


def try_out(mutant: Mutant, tree: Path) -> tuple[list[str], float]:
    """The tests that fail with the mutant, and how long that took. Leaves the tree as it was."""
    began = time.monotonic()
    program, only = mutant.test.split()
    if failed := failing_tests(UNCHANGED / program, only):
        sys.exit(f"mutants: the unchanged tree already fails {failed}")
    file = tree / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        build(tree, program)
        failed = failing_tests(tree / "build" / "bin" / program, only)
    finally:
        file.write_text(text)
    return failed, time.monotonic() - began


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
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in TREES:
        copy_to(tree)
        build(tree)
        free.put(tree)
    shutil.rmtree(UNCHANGED, ignore_errors=True)
    shutil.copytree(TREES[0] / "build" / "bin", UNCHANGED)

    def turns_red(mutant: Mutant) -> bool:
        tree = free.get()
        try:
            failed, seconds = try_out(mutant, tree)
        finally:
            free.put(tree)  # after an error, too: the other worker may wait for it
        verdict = f"red: {failed[0]}" if failed else f"SURVIVED: {mutant.test} passes"
        print(f"{mutant.name:40} {verdict}  ({seconds:.0f} s)", flush=True)
        return bool(failed)

    with ThreadPoolExecutor(len(TREES)) as pool:
        red = sum(pool.map(turns_red, chosen))
    print(f"mutants: {red} of {len(chosen)} turn a test red")
    return 0 if red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
