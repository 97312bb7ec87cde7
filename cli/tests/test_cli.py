"""The command-line tool from outside: exit codes, messages, reports, Ctrl-C."""

import json
import pathlib
import re
import shlex
import signal
import subprocess
import time

import pytest
from tool import BINARY, assert_refused, run

SMALL = "64,32,16,8,2"
COMMON = (
    "--help, --thiek, --dtype, --activation, --router_input, --topk_over_softmax, "
    "--norm_topk_probs, --rounding, --tile, --concat_layout, --add_bias, --inference, --layer, --device, --threads, "
    "--seed, --json, --multiprocessors"
)
RULES = "nearest, stochastic, nearest_scores, balance, up, down"
ACTIVATIONS = (
    "swiglu, geglu, geglu_tanh, reglu, relu, relu_sq, gelu, gelu_tanh, silu, swiglu_clamp_after, "
    "swiglu_oai, situ_glu, quick_geglu"
)


def layer(shape, rest=""):
    """The option of a layer that the library wrote, of T,H,I,E,K on the CPU."""
    keys = ("tokens", "hidden", "intermediate", "experts", "top_k")
    sizes = " ".join(f"{key}={value}" for key, value in zip(keys, shape.split(","), strict=True))
    return f"--layer '{sizes} dtype=f32{rest}'"


BAD = [
    # (arguments, the line on stderr after "sonicmoe: ")
    ("benchmark", "subcommand: got 'benchmark', allowed: check, bench, info, route"),
    ("--speed", "option: got '--speed', allowed: --help, --version"),
    ("info extra", f"argument: got 'extra', allowed: options only ({COMMON})"),
    ("info info", f"argument: got 'info', allowed: options only ({COMMON})"),
    ("bench --add_bias=maybe", "--add_bias: got 'maybe', allowed: no value"),
    ("bench --topk_over_softmax=0", "--topk_over_softmax: got '0', allowed: no value"),
    ("--json x info", "option: got '--json', allowed: --help, --version"),
    (
        "bench --speed 3",
        f"option: got '--speed', allowed: {COMMON}, --case, --configs, --ops, --every-kernel, --beside, --repeats, --steady-state, --skew",
    ),
    ("bench --thiek", "--thiek: got nothing, allowed: T,H,I,E,K"),
    ("bench --threads", "--threads: got nothing, allowed: 1 to 4096"),
    ("bench --dtype", "--dtype: got nothing, allowed: f32, bf16, f16"),
    ("bench --seed 1 --seed 2", "--seed: got 2 values, allowed: one"),
    ("bench --thiek 1,2,3", "--thiek: got '1,2,3', allowed: five integers T,H,I,E,K"),
    ("bench --thiek 8,8,8,8,x", "--thiek: got '8,8,8,8,x', allowed: five integers T,H,I,E,K"),
    ("bench --thiek 8,8,8,8,1,1", "--thiek: got '8,8,8,8,1,1', allowed: five integers T,H,I,E,K"),
    ("info --dtype f32", "--dtype: got 'f32', allowed: only with --thiek"),
    ("check --add_bias", "--add_bias: got 'true', allowed: only with --thiek"),
    ("check --case nothing", "--case: got 'nothing', allowed: what --list_cases prints"),
    (
        f"check --case inference/topk/f32 --thiek {SMALL}",
        f"--thiek: got '{SMALL}', allowed: only without --case",
    ),
    (
        "check --case inference/topk/f32 --seed 3",
        "--seed: got '3', allowed: only without --case",
    ),
    (
        "bench --case huge",
        "--case: got 'huge', allowed: 1.4B-n256, 1.4B-n512, 1.4B-n1024, 7B-n256, 7B-n512, "
        "7B-n1024, 30B-n256, 30B-n512, 30B-n1024, 120B-n512, 120B-n1024, 120B-n2048, cpu",
    ),
    ("bench --dtype f64", "--dtype: got 'f64', allowed: f32, bf16, f16"),
    ("bench --activation tanh", f"--activation: got 'tanh', allowed: {ACTIVATIONS}"),
    ("bench --activation geglu(l=7)", f"--activation: got 'geglu(l=7)', allowed: {ACTIVATIONS}"),
    ("bench --rounding ns", f"--rounding: got 'ns', allowed: {RULES}"),
    ("check --rounding up", "--rounding: got 'up', allowed: only with --thiek"),
    ("bench --tile 64", "--tile: got '64', allowed: only with --rounding"),
    ("bench --rounding up --tile 1025", "--tile: got '1025', allowed: integers from 1 to 1024"),
    ("bench --device tpu", "--device: got 'tpu', allowed: cpu, cuda"),
    ("bench --threads 0", "--threads: got '0', allowed: integers from 1 to 4096"),
    ("bench --threads two", "--threads: got 'two', allowed: integers from 1 to 4096"),
    (
        "check --multiprocessors -2",
        "--multiprocessors: got '-2', allowed: integers from 0 to 4096",
    ),
    ("bench --steady-state 100", "--steady-state: got --device cpu, allowed: --device cuda"),
    ("bench --repeats 0", "--repeats: got '0', allowed: integers from 1 to 1000000"),
    ("bench --skew -1", "--skew: got '-1', allowed: numbers from 0 to 1000"),
    ("bench --seed -1", "--seed: got '-1', allowed: integers from 0 to 9007199254740992"),
    (
        "bench --json /no/such/folder/report.json",
        "--json: got '/no/such/folder/report.json', allowed: a file that can be written",
    ),
    (
        "check --layer topk=2",
        "--layer: layer: got 'topk=2', allowed: KEY=VALUE with a key of "
        "layer_fields(): tokens, hidden, ...",
    ),
    ("check --layer dtype=f64", "--layer: dtype: got 'f64', allowed: f32, bf16, f16"),
    (
        "bench --router_input ids",
        "--router_input: got 'ids', allowed: projection, logits, logits_and_ids, ids_and_weights, "
        "lists",
    ),
    (
        "bench --layer router_input=lists",
        "--layer: got router_input=lists, allowed: projection, logits, logits_and_ids, "
        "ids_and_weights",
    ),
    (
        "bench --layer w1_layout=separate",
        "--layer: got w1_layout=separate, allowed: interleaved, concatenated, transposed, "
        "transposed_interleaved",
    ),
    (
        "bench --beside w1_layout=separate",
        "--beside: got w1_layout=separate, allowed: interleaved, concatenated, transposed, "
        "transposed_interleaved",
    ),
    ("check --seed 3", "--seed: got '3', allowed: only with --thiek or --layer"),
    ("check --list_cases --json x", "--json: got 'x', allowed: only without --list_cases"),
    (
        "check --layer accumulate_weight_grads=true",
        "--layer: got accumulate_weight_grads=true, allowed: false (there is nothing to add to)",
    ),
    (
        "check --layer 'router_input=lists list_length=7'",
        "--layer: got list_length=7, allowed: 0 without tokens",
    ),
    (
        "check --layer 'row_source=contiguous top_k=99'",
        "--layer: got top_k=99, allowed: no options of a router with row_source=contiguous",
    ),
    (
        "info --layer 'row_source=contiguous rounding_tile=9999'",
        "--layer: got rounding_tile=9999, allowed: no options of a router with "
        "row_source=contiguous",
    ),
    ("bench --beside activation=tanh", f"--beside: activation: got 'tanh', allowed: {ACTIVATIONS}"),
    (
        "bench --layer top_k=2 --configs targets",
        "--layer: got 'top_k=2', allowed: only without --configs",
    ),
    # The library's own refusals, behind the options that caused them.
    (
        "bench --thiek 16,12,8,4,2",
        f"{layer('16,12,8,4,2')}: hidden: got 12, allowed: multiples of 8 from 8 to 1048576",
    ),
    (
        "check --thiek 16,8,20,4,2",
        f"{layer('16,8,20,4,2')}: intermediate: got 20, allowed: multiples of 8 from 8 to 1048576",
    ),
    (
        "check --thiek 16,8,8,4,2 --activation geglu(limit=7)",
        f"{layer('16,8,8,4,2', ' activation=geglu(limit=7)')}: "
        "activation.limit: got 7, allowed: inf (geglu has no limit)",
    ),
    (
        "check --thiek 16,8,8,4,2 --activation swiglu(limit=-7)",
        f"{layer('16,8,8,4,2', ' activation=swiglu(limit=-7)')}: "
        "activation.limit: got -7, allowed: numbers above 0, or inf",
    ),
    ("info --thiek 16,8,8,4,5", f"{layer('16,8,8,4,5')}: top_k: got 5, allowed: 1 to experts (4)"),
    (
        "bench --thiek -1,8,8,4,2",
        f"{layer('-1,8,8,4,2')}: tokens: got -1, allowed: 0 to 2147483647",
    ),
    (
        "info --thiek 16,8,8,4,2 --multiprocessors 2",
        f"{layer('16,8,8,4,2')} --multiprocessors 2: "
        "multiprocessors: got 2, allowed: 0 (on the CPU)",
    ),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[case[0] or "nothing" for case in BAD])
def test_bad_options_end_with_one_line(arguments, message):
    assert_refused(run(*shlex.split(arguments)), message)


def test_a_refusal_leaves_reports_alone(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    for path in [new, old]:
        assert run("info", "--thiek", "16,12,8,4,2", "--json", path).returncode == 2
    assert not new.exists()
    assert old.read_text() == "{}"
    assert run("info", "--json", tmp_path).stderr == (
        f"sonicmoe: --json: got '{tmp_path}', allowed: a file that can be written\n"
    )


def test_version_and_help():
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run("--version").stdout)
    for subcommand in [[], ["check"], ["bench"], ["info"], ["route"]]:
        result = run(*subcommand, "--help")
        assert result.returncode == 0
        assert "--help" in result.stdout
    bare = run()
    assert bare.returncode == 0 and bare.stdout == run("--help").stdout


def fields(report):
    """Names at every level of a report."""
    if isinstance(report, list):
        return set().union(*map(fields, report))
    if isinstance(report, dict):
        return set(report).union(*map(fields, report.values()))
    return set()


@pytest.mark.parametrize(
    "arguments",
    [
        f"check --thiek {SMALL}",
        f"bench --thiek {SMALL} --repeats 1 --rounding up",
        f"info --thiek {SMALL} --rounding up",
        f"route --thiek {SMALL}",
    ],
)
def test_help_names_every_field_of_the_report(tmp_path, arguments):
    path = tmp_path / "report.json"
    assert run(*arguments.split(), "--json", path).returncode == 0
    text = run(arguments.split()[0], "--help").stdout
    of_layer = re.search(r"\n  --layer .*?(?=\n  --)", text, re.DOTALL) or [""]  # route has none
    documented = set(re.findall(r"\w+", text[text.index("JSON:") :] + of_layer[0]))
    assert fields(json.loads(path.read_text())) <= documented


def test_info_lists_devices_kernels_and_explains_a_plan(tmp_path):
    path = tmp_path / "info.json"
    result = run("info", "--thiek", SMALL, "--dtype", "bf16", "--json", path)
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert report["devices"][0]["id"] == "cpu:0" and report["devices"][0]["usable"]
    operations = {kernel["op"] for kernel in report["kernels"]}
    assert {"up_proj", "down_proj_dgrad", "top_k", "metadata"} <= operations
    assert report["layer"]["dtype"] == "bf16" and report["layer"]["rounding_tile"] == 0
    assert report["explain"] in result.stdout


def test_info_explains_a_rounded_layer(tmp_path):
    path = tmp_path / "info.json"
    arguments = f"--thiek {SMALL} --rounding balance --tile 16".split()
    assert run("info", *arguments, "--json", path).returncode == 0
    report = json.loads(path.read_text())
    assert report["layer"]["rounding_rule"] == "balance"
    assert report["layer"]["rounding_tile"] == 16
    assert "\ntoken_rounding," in report["explain"] and "\ntop_k," not in report["explain"]


def check_report(path, *arguments):
    result = run("check", *arguments, "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    report = json.loads(path.read_text())
    checks = [
        (case["name"], part["name"], check)
        for case in report["cases"]
        for part in case["reports"]
        for check in part["checks"]
    ]
    assert report["failed"] == 0 and report["passed"] == len(checks)
    for case, part, check in checks:
        # What the tool calls passed is what its own figures say.
        assert check["pass"] and check["error"] <= check["bound"], (case, part, check)
        line = f"  {part:<16} {check['tensor']:<13} error {check['error']:.2e} "
        assert line in result.stdout
    assert result.stdout.endswith(f"{len(checks)} passed, 0 failed\n")
    return report, checks


def test_check_runs_the_smoke_cases(tmp_path):
    report, checks = check_report(tmp_path / "check.json")
    assert len(report["cases"]) > 5
    assert {case["name"].rsplit("/")[-1] for case in report["cases"]} == {"f32", "bf16"}
    # Errors are measured, not defaults: bf16 rounding is visible in every layer's output.
    for case, part, check in checks:
        if part == "layer" and check["tensor"] == "o" and case.endswith("/bf16"):
            assert 1e-4 < check["error"] < 1e-2


def test_check_of_one_shape_covers_layer_and_operations(tmp_path):
    arguments = f"--thiek {SMALL} --dtype bf16 --add_bias --activation geglu --seed 3".split()
    report, checks = check_report(tmp_path / "check.json", *arguments)
    (case,) = report["cases"]
    text = "tokens=64 hidden=32 intermediate=16 experts=8 top_k=2 activation=geglu bias=true"
    assert case["repro"].startswith(f"sonicmoe check --layer '{text}' --seed 3")
    again, same = check_report(tmp_path / "again.json", *shlex.split(case["repro"])[2:])
    assert again["cases"] == report["cases"] and len(same) == len(checks)
    layer_tensors = {check["tensor"] for _, part, check in checks if part == "layer"}
    assert {"o", "dx", "dw1", "dw2", "db1", "db2", "drouter_w", "logits"} <= layer_tensors
    operations = {part for _, part, _ in checks}
    assert {"top_k", "metadata", "up_proj", "down_proj", "down_proj_dgrad"} <= operations
    assert {"up_proj_dgrad", "down_proj_wgrad", "up_proj_wgrad", "bias_grad"} <= operations


@pytest.mark.parametrize("given", ["logits", "logits_and_ids", "ids_and_weights"])
def test_what_the_caller_hands_over_is_checked_and_timed(tmp_path, given):
    arguments = f"--thiek {SMALL} --router_input {given}".split()
    report, checks = check_report(tmp_path / "check.json", *arguments)
    assert f" router_input={given}'" in report["cases"][0]["repro"]
    of_layer = {check["tensor"] for _, part, check in checks if part == "layer"}
    assert ("dscores" if given == "ids_and_weights" else "dlogits") in of_layer
    assert "drouter_w" not in of_layer
    path = tmp_path / "bench.json"
    result = run("bench", *arguments, "--ops", "--repeats", "2", "--json", path)
    assert result.returncode == 0, result.stderr
    timed = {row["what"] for row in json.loads(path.read_text())["results"]}
    assert {"metadata", "up_proj", "score_grad", "aggregate_dx"} <= timed
    assert ("top_k" in timed) == (given != "ids_and_weights")
    assert not timed & {"router_gemm", "router_dgrad", "router_wgrad"}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rest", ["stochastic --tile 8", "up --add_bias --topk_over_softmax"])
def test_check_of_a_rounded_layer(tmp_path, dtype, rest):
    arguments = f"--thiek 300,32,16,8,2 --dtype {dtype} --rounding {rest}".split()
    report, checks = check_report(tmp_path / "check.json", *arguments)
    repro = report["cases"][0]["repro"]
    tile = 8 if "--tile" in rest else 128
    assert f" rounding_tile={tile} rounding_rule={arguments[5]}" in repro
    of_layer = {check["tensor"]: check for _, part, check in checks if part == "layer"}
    assert {"lists", "frequency", "scores", "o", "dx", "drouter_w", "dw1", "dw2"} <= set(of_layer)
    smallest = {"f32": 1e-8, "bf16": 1e-4}[dtype]
    for tensor in ["o", "dx", "drouter_w", "dw1"]:
        assert smallest < of_layer[tensor]["error"] <= of_layer[tensor]["bound"] < 200 * smallest
    exact = {check["tensor"]: check for _, part, check in checks if part == "as_given"}
    assert {"counts", "o", "preact", "dx", "drouter_w", "dw1", "dw2"} <= set(exact)
    assert all(check["error"] == check["bound"] == 0 for check in exact.values())


def test_listed_cases_can_be_run_by_name(tmp_path):
    names = run("check", "--list_cases").stdout.splitlines()
    assert len(names) == len(set(names)) > 100
    report, _ = check_report(tmp_path / "check.json", "--case", names[-1])
    assert [case["name"] for case in report["cases"]] == [names[-1]]
    assert report["cases"][0]["repro"].startswith(f"sonicmoe check --case {names[-1]} ")


def test_layers_are_timed_beside_each_other(tmp_path):
    path = tmp_path / "bench.json"
    arguments = f"--thiek {SMALL} --concat_layout --ops --repeats 2".split()
    others = ["activation=reglu bias=true", "w1_layout=transposed_interleaved"]
    for options in others:
        arguments += ["--beside", options]
    result = run("bench", *arguments, "--json", path)
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    layers = [one["layer"] for one in [report, *report["beside"]]]
    assert [layer["activation"] for layer in layers] == ["swiglu", "reglu", "swiglu"]
    layouts = ["concatenated", "concatenated", "transposed_interleaved"]
    assert [layer["w1_layout"] for layer in layers] == layouts
    for one, bias in zip([report, *report["beside"]], [False, True, False], strict=True):
        rows = {row["what"]: row["runs"] for row in one["results"]}
        assert ("bias_grad" in rows) == bias
        assert rows["forward"] == rows["up_proj"] == 2
        assert f"beside it, with {others[0]}" in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        "f32_weight_grads=true",
        "dpreact_in_workspace=false",
        "router_input=ids_and_weights max_rows=3",
        "router_input=logits_and_ids f32_logits=true",
    ],
)
def test_layers_with_tensors_of_other_sizes_are_timed(options):
    sizes = "tokens=64 hidden=64 intermediate=32 experts=8 top_k=2 dtype=bf16"
    for seed in range(3):
        result = run("bench", "--layer", f"{sizes} {options}", "--repeats", 1, "--seed", seed)
        assert result.returncode == 0, result.stderr


def test_one_token_is_not_held_to_the_bound_of_many():
    """An error of A' is that of a whole column of dW2, where an expert has one row."""
    sizes = "tokens=1 hidden=64 intermediate=8 experts=16 top_k=11 dtype=f32"
    options = "activation=geglu w1_layout=concatenated"
    result = run("check", "--threads", 1, "--layer", f"{sizes} {options}")
    assert result.returncode == 0, result.stdout


def test_output_that_cannot_be_written_is_an_error():
    with pathlib.Path("/dev/full").open("w") as full:
        result = subprocess.run([BINARY, "info"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 1
    assert result.stderr == b"sonicmoe: standard output: not all of it could be written\n"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rest", ["", "--add_bias --concat_layout --topk_over_softmax"])
def test_bench_reports_every_operation(tmp_path, dtype, rest):
    path = tmp_path / "bench.json"
    arguments = f"--thiek {SMALL} --dtype {dtype} {rest} --ops --repeats 3".split()
    result = run("bench", *arguments, "--json", path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no progress line when it is not a terminal
    report = json.loads(path.read_text())
    rows = {row["what"]: row for row in report["results"]}
    gemms = ["up_proj", "down_proj", "down_proj_dgrad", "up_proj_dgrad", "down_proj_wgrad"]
    gemms.append("up_proj_wgrad")
    for what in ["forward", "backward", "total", *gemms]:
        row = rows[what]
        assert row["runs"] == 3 and row["ms"] > 0 and row["mad_ms"] >= 0
        assert row["of_dense_bound"] == pytest.approx(row["dense_bound_ms"] / row["ms"])
    tokens, hidden, width, _, top_k = (int(word) for word in SMALL.split(","))
    flops = 6 * tokens * top_k * hidden * width
    assert rows["forward"]["tflops"] * rows["forward"]["ms"] * 1e9 == pytest.approx(flops)
    assert rows["backward"]["tflops"] * rows["backward"]["ms"] * 1e9 == pytest.approx(2 * flops)
    assert [gemm["gemm"] for gemm in report["dense_bound"]] == gemms
    size = {"f32": 4, "bf16": 2}[dtype]
    saved = report["saved_bytes"]
    assert saved["x"] == tokens * hidden * size
    assert saved["preact"] == 2 * tokens * top_k * width * size
    assert saved["total"] == sum(saved[term] for term in ["x", "preact", "routing", "logits"])
    assert ("bias_grad" in rows) == ("--add_bias" in rest)
    assert not report["interrupted"]


@pytest.mark.parametrize("rule", ["up", "down"])
def test_bench_counts_the_rows_that_rounding_leaves(tmp_path, rule):
    path = tmp_path / "bench.json"
    arguments = f"--thiek {SMALL} --rounding {rule} --tile 16 --ops --repeats 2".split()
    result = run("bench", *arguments, "--json", path)
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    tokens, hidden, width, _, top_k = (int(word) for word in SMALL.split(","))
    rows = report["rows"]
    assert rows % 16 == 0
    assert rows > tokens * top_k if rule == "up" else rows < tokens * top_k
    assert f"\n{rows} rows after token rounding, 128 before, room for" in result.stdout
    times = {row["what"]: row for row in report["results"]}
    assert {"token_rounding", "token_rounding_grad", "metadata", "score_grad"} <= set(times)
    assert "top_k" not in times
    flops = 6 * rows * hidden * width
    for what, share in [("forward", 1), ("backward", 2), ("up_proj", 2 / 3), ("down_proj", 1 / 3)]:
        assert times[what]["tflops"] * times[what]["ms"] * 1e9 == pytest.approx(share * flops)
    for gemm in report["dense_bound"]:
        assert gemm["ms"] * gemm["tflops"] * 1e9 == pytest.approx(
            flops * (2 / 3 if gemm["gemm"].startswith("up") else 1 / 3)
        )
    # Reads the rows in use and weights, writes the rows in use.
    moved = 4 * (rows * width + 8 * hidden * width + rows * hidden)
    assert times["down_proj"]["gbps"] * times["down_proj"]["ms"] * 1e6 == pytest.approx(moved)


def test_bench_skews_the_experts(tmp_path):
    path = tmp_path / "bench.json"
    shape = "--thiek 4096,64,16,16,2 --dtype f32 --repeats 1 --inference".split()
    result = run("bench", *shape, "--json", path)
    assert result.returncode == 0, result.stderr
    even = json.loads(path.read_text())
    assert even["skew"] == 0 and 0 < even["fewest_rows"] < 512 < even["most_rows"] < 700
    result = run("bench", *shape, "--skew", "1", "--json", path)
    assert result.returncode == 0, result.stderr
    skewed = json.loads(path.read_text())
    assert skewed["skew"] == 1 and skewed["rows"] == even["rows"] == 8192
    # Two of softmax(logits) a token: e^0 against the mean e^(-ln i) = 0.21 times as many.
    assert skewed["most_rows"] > 1500 and skewed["fewest_rows"] < 300
    counts = f"rows of an expert: {skewed['fewest_rows']} to {skewed['most_rows']}, mean 512.0"
    assert counts in result.stdout


def test_bench_takes_shapes_by_name(tmp_path):
    path = tmp_path / "bench.json"
    result = run("bench", "--case", "cpu", "--inference", "--repeats", "1", "--json", path)
    assert result.returncode == 0, result.stderr
    assert json.loads(path.read_text())["layer"]["thiek"] == [4096, 512, 256, 32, 4]


def test_bench_inference_times_forward_alone(tmp_path):
    path = tmp_path / "bench.json"
    arguments = f"--thiek {SMALL} --inference --repeats 2".split()
    assert run("bench", *arguments, "--json", path).returncode == 0
    report = json.loads(path.read_text())
    assert [row["what"] for row in report["results"]] == ["forward"]
    assert report["saved_bytes"]["total"] == 0


def test_interrupt_prints_what_there_is(tmp_path):
    path = tmp_path / "bench.json"
    arguments = f"bench --thiek {SMALL} --repeats 1000000 --json {path}".split()
    for wait in (3, 30):  # a busy machine takes a while to warm up
        with subprocess.Popen(
            [BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert stderr == ""
        assert stdout.endswith("interrupted\n")
        report = json.loads(path.read_text())
        assert report["interrupted"]
        if report["results"]:
            break
    assert "forward" in stdout
    assert 0 < report["results"][0]["runs"] < 1000000


def test_cpp_quick_start():
    example = pathlib.Path(BINARY).with_name("cpp_quickstart")
    result = subprocess.run([example], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    counts, values = result.stdout.splitlines()
    assert sum(int(word) for word in counts.split(":")[1].split()) == 256 * 2  # T*K
    o, dx = (float(word) for word in re.findall(r"= ([^,]+),", values))
    assert 0 < abs(o) < 1 and 0 < abs(dx) < 1
