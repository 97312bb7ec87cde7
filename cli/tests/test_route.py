"""`sonicmoe route`: what token rounding does, on logits whose answer is known by hand."""

import json
import math
import struct

import numpy
import pytest
from tool import assert_refused, run

# Full-softmax probabilities of 8 tokens for 3 experts. With one expert a token, 5 tokens choose
# expert 0, 2 choose expert 1 and 1 chooses expert 2. Tiles of 4 lie at 4 and 8, 0 and 4, 0 and 4.
PROBABILITIES = [
    (0.90, 0.06, 0.04),
    (0.80, 0.15, 0.05),
    (0.70, 0.10, 0.20),
    (0.60, 0.25, 0.15),
    (0.50, 0.30, 0.20),  # the weakest of expert 0
    (0.35, 0.55, 0.10),
    (0.20, 0.75, 0.05),
    (0.30, 0.25, 0.45),  # the only one of expert 2
]
LOGITS = [[math.log(p) for p in token] for token in PROBABILITIES]
MASS = 0.90 + 0.80 + 0.70 + 0.60 + 0.50 + 0.55 + 0.75 + 0.45
FIELDS = ["rows", "padded", "dropped", "added", "up", "down", "clamped", "largest", "total"]


def raw(rows):
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)


def npy(data, shape="(8, 3)", descr="<f4", fortran=False, version=1):
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    header = header.ljust(117) + "\n"
    prefix = b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H", len(header))
    return prefix + header.encode() + data


def route(tmp_path, *arguments):
    """Results by rule, and the whole report."""
    path = tmp_path / "route.json"
    result = run("route", *arguments, "--json", path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    report = json.loads(path.read_text())
    for row in report["results"]:
        # What is printed is what is reported.
        figures = [row["rule"], *(str(row[field]) for field in FIELDS)]
        figures += [f"{100 * row['mass_lost']:.3f}", "%"]
        assert figures in [line.split() for line in result.stdout.splitlines()]
    return {row["rule"]: row for row in report["results"]}, report


def planted(tmp_path, *arguments, tokens=8):
    path = tmp_path / "logits.npy"
    path.write_bytes(npy(raw(LOGITS[:tokens]), shape=f"({tokens}, 3)"))
    rows, _ = route(tmp_path, "--logits", path, "--top_k", 1, "--tile", 4, *arguments)
    return {
        rule: ([row[field] for field in FIELDS], row["counts"], row["mass_lost"])
        for rule, row in rows.items()
    }


def test_planted_logits(tmp_path):
    rules = planted(tmp_path, "--topk_over_softmax")
    approx = pytest.approx
    # rows, padded, dropped, added, up, down, clamped, largest, total; counts; mass lost
    assert rules["top_k"] == ([8, 8, 0, 0, 0, 0, 0, 0, 0], [5, 2, 1], 0)
    down = ([4, 0, 4, 0, 0, 3, 0, 2, -4], [4, 0, 0], approx((0.50 + 0.55 + 0.75 + 0.45) / MASS))
    assert rules["down"] == down
    assert rules["nearest"] == down  # 5 is nearer to 4, 1 to 0; 2 is a tie, and ties go down
    assert rules["up"] == ([16, 0, 0, 8, 3, 0, 0, 3, 8], [8, 4, 4], 0)
    # Expert 0 goes down (-1), so expert 1 goes up (+2), and expert 2 down (-1).
    lost = approx((0.50 + 0.45) / MASS)
    assert rules["balance"] == ([8, 0, 2, 2, 1, 2, 0, 2, 0], [4, 4, 0], lost)
    for rule in ["stochastic", "nearest_scores"]:
        figures, counts, _ = rules[rule]
        assert figures[1] == 0 and counts[0] in (4, 8) and counts[1] in (0, 4)


def test_mass_is_that_of_the_scores(tmp_path):
    # Softmax over one chosen expert: every score is 1.
    assert planted(tmp_path)["down"][2] == pytest.approx(4 / 8)


def test_clamped_experts_go_down_under_every_rule(tmp_path):
    # Of the first 7 tokens expert 0 has 5; 8 rows would be more than there are tokens.
    rules = planted(tmp_path, tokens=7)
    assert rules["up"][:2] == ([8, 0, 1, 2, 1, 1, 1, 2, 1], [4, 4, 0])
    assert all(row[1][0] == 4 and row[0][6] == 1 for rule, row in rules.items() if rule != "top_k")


def test_files_of_both_kinds_say_the_same(tmp_path):
    (tmp_path / "hand.npy").write_bytes(npy(raw(LOGITS)))
    (tmp_path / "raw.bin").write_bytes(raw(LOGITS))
    numpy.save(tmp_path / "numpy.npy", numpy.array(LOGITS, dtype=numpy.float32))
    tails = {"hand.npy": [], "raw.bin": ["--te", "8,3"], "numpy.npy": ["--te", "8,3"]}
    results = []
    for name, tail in tails.items():
        path = tmp_path / name
        rows, report = route(tmp_path, "--logits", path, "--top_k", 2, "--tile", 2, *tail)
        assert report["logits"] == str(path)
        assert (report["tokens"], report["experts"], report["top_k"]) == (8, 3, 2)
        results.append(rows)
    assert results[0] == results[1] == results[2]


def test_random_router(tmp_path):
    shape = ["--thiek", "2000,1,1,16,3"]
    rows, report = route(tmp_path, *shape, "--skew", 0.7, "--counts", "--seed", 4)
    assert report["logits"] is None and report["skew"] == 0.7 and report["seed"] == 4
    assert [report[key] for key in ["tokens", "experts", "top_k", "tile"]] == [2000, 16, 3, 128]
    plain = rows["top_k"]
    assert plain["rows"] == sum(plain["counts"]) == 6000
    assert plain["padded"] == sum(-count % 128 for count in plain["counts"]) > 0
    # Popular experts first, but for chance: 4 standard deviations of a count below 6000.
    first, last = plain["counts"][:8], plain["counts"][8:]
    assert sum(first) - sum(last) > 4 * math.sqrt(6000)
    for rule, row in rows.items():
        deviations = [a - b for a, b in zip(row["counts"], plain["counts"], strict=True)]
        assert row["rows"] == sum(row["counts"])
        assert row["total"] == sum(deviations) == row["added"] - row["dropped"]
        assert row["largest"] == max(map(abs, deviations)) < 128
        assert row["up"] == sum(d > 0 for d in deviations)
        assert row["down"] == sum(d < 0 for d in deviations)
        assert rule == "top_k" or row["padded"] == 0
        assert (row["mass_lost"] > 0) == (row["dropped"] > 0)
    assert rows["up"]["dropped"] == 0 and rows["down"]["added"] == 0
    assert abs(rows["balance"]["total"]) <= 64


def test_counts_are_printed_on_request(tmp_path):
    path = tmp_path / "logits.npy"
    path.write_bytes(npy(raw(LOGITS)))
    arguments = ["route", "--logits", path, "--top_k", 1, "--tile", 4, "--rule", "balance"]
    lines = [line.split() for line in run(*arguments, "--counts").stdout.splitlines()]
    table = [["rows", "top_k", "balance"], ["0", "5", "4"], ["1", "2", "4"], ["2", "1", "0"]]
    assert lines[-4:] == table
    assert table[0] not in [line.split() for line in run(*arguments).stdout.splitlines()]


@pytest.mark.parametrize(
    ("short", "name"), [("nr", "nearest"), ("sr", "stochastic"), ("nr_s", "nearest_scores")]
)
def test_published_names_of_rules(short, name):
    arguments = "route --thiek 512,8,8,16,3 --dtype f32 --tile 32 --rule".split()
    shown, again = (run(*arguments, rule).stdout.splitlines() for rule in (short, name))
    assert any(line.split()[:1] == [name] for line in shown)
    assert shown[1:] == again[1:]


def test_draws_follow_seed_and_offset(tmp_path):
    (tmp_path / "logits.npy").write_bytes(
        npy(raw([[(7 * t + 3 * e * t) % 11 for e in range(16)] for t in range(512)]), "(512, 16)")
    )
    common = ["--logits", tmp_path / "logits.npy", "--top_k", 3, "--tile", 32]

    def counts(*arguments):
        rows, _ = route(tmp_path, *common, *arguments)
        return rows["stochastic"]["counts"], rows["nearest"]["counts"]

    one, again = counts("--seed", 1, "--offset", 5), counts("--seed", 1, "--offset", 5)
    assert one == again
    for other in [("--seed", 1, "--offset", 6), ("--seed", 2, "--offset", 5)]:
        stochastic, nearest = counts(*other)
        assert stochastic != one[0] and nearest == one[1]


def test_bf16_logits_tie(tmp_path):
    # 1 and 1.001 are the same bf16 number, and ties go to the lower expert.
    (tmp_path / "logits.npy").write_bytes(npy(raw([[1, 1.001]] * 4), shape="(4, 2)"))
    arguments = ["--logits", tmp_path / "logits.npy", "--top_k", 1, "--rule", "down", "--dtype"]
    assert route(tmp_path, *arguments, "f32")[0]["top_k"]["counts"] == [0, 4]
    assert route(tmp_path, *arguments, "bf16")[0]["top_k"]["counts"] == [4, 0]


def test_no_tokens(tmp_path):
    rows, _ = route(tmp_path, "--thiek", "0,1,1,4,2")
    assert all(row["counts"] == [0, 0, 0, 0] and row["mass_lost"] == 0 for row in rows.values())


BAD_FILES = [
    # (bytes, further options, what stderr says after "sonicmoe: ", {file} for the path)
    (None, "", "--logits: got '{file}', allowed: a file that can be read and is not empty"),
    (b"", "", "--logits: got '{file}', allowed: a file that can be read and is not empty"),
    (raw(LOGITS), "", "--te: got nothing, allowed: T,E of a file that is not .npy"),
    (
        raw(LOGITS)[:-1],
        "--te 8,3",
        "--logits: got '{file}' with 95 bytes of numbers, allowed: 4*T*E for T,E = 8,3",
    ),
    (
        raw(LOGITS),
        "--te 8,4",
        "--logits: got '{file}' with 96 bytes of numbers, allowed: 4*T*E for T,E = 8,4",
    ),
    (
        raw(LOGITS),
        "--te -8,-3",
        "--logits: got '{file}' with 96 bytes of numbers, allowed: 4*T*E for T,E = -8,-3",
    ),
    (
        npy(raw(LOGITS)),
        "--te 4,6",
        "--te: got '4,6', allowed: 8,3, the shape in the .npy file",
    ),
    (npy(b""), "", "--logits: got '{file}' with 0 bytes of numbers, allowed: 4*T*E for T,E = 8,3"),
    (npy(b"")[:9], "", "--logits: got '{file}', .npy without a header, allowed: version 1"),
    (
        npy(b"")[:60],
        "",
        "--logits: got '{file}', .npy without a shape, allowed: a (T, E) array of float32",
    ),
    (npy(b"", version=2), "", "--logits: got '{file}', .npy version 2, allowed: version 1"),
    (
        npy(raw(LOGITS), descr="<f8"),
        "",
        "--logits: got '{file}' of type '<f8', allowed: '<f4' (little-endian float32)",
    ),
    (
        npy(raw(LOGITS), fortran=True),
        "",
        "--logits: got '{file}' in Fortran order, allowed: C order",
    ),
    (
        npy(raw(LOGITS), shape="(24,)"),
        "",
        "--logits: got '{file}' of shape (24,), allowed: two dimensions (T, E)",
    ),
    (
        npy(raw(LOGITS), shape="(" + 60000 * " " + "8, 3)"),
        "",
        "--logits: got '{file}', .npy with a header of 60060 bytes, allowed: at most 4096",
    ),
]


@pytest.mark.parametrize("data, options, message", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files(tmp_path, data, options, message):
    path = tmp_path / "logits"
    if data is not None:
        path.write_bytes(data)
    result = run("route", "--logits", path, "--top_k", 1, *options.split())
    assert_refused(result, message.format(file=path))


def test_names_of_files(tmp_path):
    path = tmp_path / "logits.npy"
    path.write_bytes(npy(raw(LOGITS)))
    for option in ("--logits", "--json"):
        files = {"--logits": path, "--json": tmp_path / "report.json"} | {option: ""}
        result = run("route", "--top_k", 1, *(text for pair in files.items() for text in pair))
        assert_refused(result, f"{option}: got '', allowed: the name of a file")
    # Not UTF-8, as JSON is.
    odd = path.rename(f"{path}\udcff")
    _, report = route(tmp_path, "--logits", odd, "--top_k", 1, "--tile", 4)
    assert report["logits"] == f"{path}\N{REPLACEMENT CHARACTER}"


def test_bad_logits(tmp_path):
    path, report = tmp_path / "logits.npy", tmp_path / "report.json"
    path.write_bytes(npy(raw([*LOGITS[:7], [0, math.nan, 0]])))
    result = run("route", "--logits", path, "--top_k", 1, "--json", report)
    line = f"--logits {path} --top_k 1 --dtype f32 --tile 128"
    assert result.returncode == 2
    assert result.stderr.startswith(f"sonicmoe: {line}: logits: ")
    assert "token 7" in result.stderr
    assert not report.exists()


RULES = "all, nearest, stochastic, nearest_scores, balance, up, down"
RANDOM = "--thiek 16,8,8,4,5 --skew 0.5 --dtype f32 --norm_topk_probs --tile 128"
BAD = [
    ("--rule best", f"--rule: got 'best', allowed: {RULES}"),
    ("--tile 0", "--tile: got '0', allowed: integers from 1 to 1024"),
    ("--tile", "--tile: got nothing, allowed: 1 to 1024"),
    ("--te 3", "--te: got '3', allowed: two integers T,E"),
    ("--te 3,4", "--te: got '3,4', allowed: only with --logits"),
    ("--top_k 2", "--top_k: got '2', allowed: only with --logits"),
    ("--logits x", "--logits: got 'x', allowed: only with --top_k"),
    ("--logits x --top_k 0", "--top_k: got '0', allowed: integers from 1 to 2147483647"),
    ("--logits x --top_k 2 --skew 1", "--logits: got 'x', allowed: only without --skew"),
    (
        "--thiek 1,2,3,4,1 --logits x --top_k 2",
        "--thiek: got '1,2,3,4,1', allowed: only without --logits",
    ),
    ("--skew -0.5", "--skew: got '-0.5', allowed: numbers from 0 to 1000"),
    ("--skew nan", "--skew: got 'nan', allowed: numbers from 0 to 1000"),
    ("--offset -1", "--offset: got '-1', allowed: integers from 0 to 9007199254740992"),
    (
        "--thiek 16,8,8,4,5 --skew 0.5 --norm_topk_probs",
        f"{RANDOM}: top_k: got 5, allowed: 1 to experts (4)",
    ),
    (
        "--thiek -16,8,8,4,2",
        "--thiek -16,8,8,4,2 --dtype f32 --tile 128: tokens: got -16, allowed: 0 to 2147483647",
    ),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[case[0] for case in BAD])
def test_bad_options(arguments, message):
    assert_refused(run("route", *arguments.split()), message)
