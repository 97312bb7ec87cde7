"""The checks of tools/ find what they are for. Each case is a small tree with one thing wrong."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import changes
import check_commits
import check_docs
import check_layers
import check_machine_code
import figures
import gpu_check
import machine_code
import pages
import prose
import run_snippets
import tile_times


def plant(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


GOOD_SOURCES = {
    "include/sonicmoe/a.h": '#include <vector>\n#include "sonicmoe/b.h"\n',
    "include/sonicmoe/b.h": "",
    "src/core/c.h": '#include "sonicmoe/a.h"\n',
    "src/cpu/d.cpp": '#include <omp.h>\n#include "core/c.h"\n',
    "cli/e.cpp": '#include "sonicmoe/a.h"\n',
    "tests/f.cpp": '#include "core/c.h"\n',
}


@pytest.mark.parametrize(
    "file, line, expected",
    [
        ("include/sonicmoe/a.h", "#include <cuda_runtime.h>", "must not include cuda_runtime.h"),
        ("include/sonicmoe/a.h", '#include "core/c.h"', "include includes src/core/c.h"),
        ("include/sonicmoe/a.h", "#include <torch/torch.h>", "must not include torch/torch.h"),
        ("src/core/c.h", '#include "../cpu/g.h"', "src/core includes src/cpu/g.h"),
        ("src/cpu/d.cpp", "#include <cutlass/cutlass.h>", "must not include cutlass/cutlass.h"),
        ("cli/e.cpp", '  #  include "core/c.h"', "cli includes src/core/c.h"),
        ("cli/e.cpp", "#include <sonicmoe/gone.h>", "no public header sonicmoe/gone.h"),
        ("src/new/h.cpp", "", "src/new: no rule"),
    ],
)
def test_layers(tmp_path, file, line, expected):
    plant(tmp_path, {**GOOD_SOURCES, "src/cpu/g.h": ""})
    assert check_layers.check(tmp_path)[1] == []
    plant(tmp_path, {file: GOOD_SOURCES.get(file, "") + line + "\n"})
    (problem,) = check_layers.check(tmp_path)[1]
    assert expected in problem


INNER_SOURCES = {
    "src/cuda/device/ptx.cuh": "",
    "src/cuda/rows/sum.cu": '#include "cuda/device/ptx.cuh"\n',
    "src/cuda/routing/routing.cuh": '#include "cuda/device/ptx.cuh"\n',
    "src/cuda/sm90/traits.cuh": '#include "cuda/device/ptx.cuh"\n',
    "src/cuda/sm90/pipeline.cuh": '#include "cuda/sm90/traits.cuh"\n',
    "src/cuda/sm90/epilogue/store.cuh": '#include "cuda/sm90/pipeline.cuh"\n',
    "src/cuda/sm90/launch.cuh": "",
    "src/cuda/sm90/op.cu": '#include "cuda/sm90/epilogue/store.cuh"\n',
}


def test_layers_inside_cuda_know_every_file(tmp_path):
    plant(tmp_path, {**GOOD_SOURCES, "src/cuda/sm90/new.cuh": "", "src/cuda/storage.cuh": ""})
    assert check_layers.check(tmp_path)[1] == ["src/cuda/sm90/new.cuh: in no layer of INNER"]


@pytest.mark.parametrize(
    "file, include, expected",
    [
        ("src/cuda/device/ptx.cuh", "cuda/sm90/traits.cuh", "device of src/cuda includes"),
        ("src/cuda/rows/sum.cu", "cuda/routing/routing.cuh", "rows of src/cuda includes"),
        ("src/cuda/sm90/traits.cuh", "cuda/sm90/pipeline.cuh", "traits of src/cuda includes"),
        ("src/cuda/sm90/pipeline.cuh", "cuda/sm90/epilogue/store.cuh", "pipeline of src/cuda"),
        ("src/cuda/sm90/epilogue/store.cuh", "cuda/sm90/launch.cuh", "epilogue of src/cuda"),
    ],
)
def test_layers_inside_cuda(tmp_path, file, include, expected):
    plant(tmp_path, {**GOOD_SOURCES, **INNER_SOURCES})
    assert check_layers.check(tmp_path)[1] == []
    plant(tmp_path, {file: INNER_SOURCES[file] + f'#include "{include}"\n'})
    (problem,) = check_layers.check(tmp_path)[1]
    assert expected in problem


GOOD_DOCUMENTS = {
    "README.md": "# One `two`: three\n[a](docs/a.md#part-1) [b](#one-two-three) [c](https://x.y)\n"
    "```\n[not](a-link.md)\n```\n`src/x.h`\n",
    "docs/a.md": "## Part\n## Part\n[up](../README.md) `[not](a-link.md)`\n",
    "src/x.h": "// See docs/a.md#part.\n",
}


@pytest.mark.parametrize(
    "file, line, expected",
    [
        ("README.md", "[a](docs/gone.md)", "README.md:7: docs/gone.md: no such file"),
        ("README.md", "[a](docs/a.md#part-2)", "docs/a.md#part-2: no such heading"),
        ("README.md", "[a]: docs/gone.md", "docs/gone.md: no such file"),
        ("README.md", '<img src="docs/gone.png">', "docs/gone.png: no such file"),
        ("README.md", "`src/gone.cpp`", "src/gone.cpp: no such file"),
        ("docs/a.md", "[a](../../outside)", "leaves the repository"),
        ("src/x.h", "// docs/gone.md", "docs/gone.md: no such file"),
    ],
)
def test_docs(tmp_path, file, line, expected):
    plant(tmp_path, GOOD_DOCUMENTS)
    assert check_docs.check(tmp_path)[1] == []
    plant(tmp_path, {file: GOOD_DOCUMENTS[file] + line + "\n"})
    (problem,) = check_docs.check(tmp_path)[1]
    assert expected in problem


LONG = " ".join(["w"] * 36)  # one word over the limit
HALF = LONG[: 2 * 20 - 1]
LINE = "words " * 18  # 107 columns, and a space


@pytest.mark.parametrize(
    "text, expected",
    [
        # The length of a sentence, and where one ends.
        (f"{LONG[2:]}.", []),
        (f"Title.\n{LONG}.", ['2: sentence of 36 words, allowed: 35: "w w w w w w w w..."']),
        (f"One. {LONG}", ["1: sentence of 36"]),
        (f"{HALF}.** {HALF}", []),
        (f"{HALF}: {HALF}", ["1: sentence of 40"]),
        (f"{HALF}; {HALF}", ["1: sentence of 40"]),
        (f"{HALF}, e.g. {HALF}", ["1: sentence of 41"]),
        (f"{HALF} ... {HALF}", ["1: sentence of 40"]),
        (f"{HALF}\n\n{HALF}", []),
        (f"- {HALF}\n- {HALF}\n1. {HALF}", []),
        (f"{HALF}\n- one\n  {LONG}", ["2: sentence of 37"]),
        (f"`{LONG}` [one]({'x' * 9}/a_b.md)", []),
        (f"# {LONG}", []),
        (f"| {LONG} |\n|---|", []),
        (f"```\n{LONG}\n```", []),
        (f"<!--\n{LONG}\n-->", []),
        (f"One:\n\n    {LONG}\n\n    {LONG}", []),
        (f"- One:\n\n    {LONG}", ["3: sentence of 36"]),
        # Figures.
        ("It takes 3 us at 2 sizes.", []),
        ("It takes 3 us, ~2.5 us and\n-4 %.", ["1: 3 figures in a sentence, allowed: 2"]),
        ("It takes (1 us), **2** and [3 us](4.md).", ["1: 3 figures"]),
        ("It has 1,000 of 2^31 elements, 3 of them 2x.", ["1: 4 figures"]),
        ("It takes 1 of `2 3 4 5` and 6 of [them](7 8 9).", []),
        ("It takes 1 us at 24576,1536,256,128,8 in x1, bf16 and sm_90.", []),
        ("It takes 1 us for tiles of 128 x 256.", []),
        ("It needs CUDA 13, PyTorch 2.11, g++ 12 and 4 GB.", []),
        ("At 1 there are 2, at 3 there is none.", ["1: 3 figures"]),
        ("It takes 1 us at 7B-n256 and 1.4B-n512, 2Td + 4n bytes.", []),
        ("It takes 1 us. It takes 2 us: 3 %.", []),
        ("| 1 | 2 | 3 |", []),
        # Columns.
        (LINE, ["1: 107 columns, allowed: 100"]),
        (LINE[8:], []),
        (f"One\n{LINE[8:]}x", ["2: 101 columns"]),
        ("- [x](https://" + "x" * 100 + ").", []),
        ("[x]: https://" + "x" * 100, []),
        (f"```\n{LINE}\n```\n| {LINE}|\n<!-- {LINE} -->", []),
    ],
)  # fmt: skip
def test_prose(text, expected):
    found = [f"{line}: {why}" for line, why in prose.problems(text + "\n")]
    assert len(found) == len(expected), found
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start)


@pytest.fixture
def history(tmp_path):
    """A repository with one commit, its id, and a function that runs git in it."""

    def git(*args):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "Before the rules.")
    return tmp_path, git("rev-parse", "HEAD"), git


PAGES = {
    "docs/glossary.md": "# Words\n\n## Not\n\n| not | but |\n|---|---|\n| a turn, dealt | b |\n",
    "docs/performance.md": "| 7B-n256 | 24576, 1536, 256, 128, 8 | 1 |\n",
}


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"{LONG}.", "a.md:1: sentence of 36 words"),
        ("\n" * 400, "a.md:401: 401 lines, allowed: 400"),
        ("x\nIt is\nDealt out.", 'a.md:3: got "Dealt", allowed: "b"'),
        ("Two a turns, `dealt` [out](dealt.md), redealt.", 'a.md:1: got "a turns", allowed: "b"'),
        ("Shape A = 24576,1536,256,128,9.", 'a.md:1: got "A = 24576,1536,256,128,9", allowed: a n'),
        ("At 7B-n512.", 'a.md:1: got "7B-n512", allowed: 7B-n256'),
        ("| 24576,1536,256,128,8 |", 'a.md:1: got "24576,1536,256,128,8", allowed: "7B-n256"'),
        ("At 7B-n256, T,d,n,E,K = 1,2,3,4,5 and `24576,1536,256,128,8`.", None),
    ],
)
def test_pages(tmp_path, text, expected):
    plant(tmp_path, {**PAGES, "a.md": text + "\n", "docs/findings/archive/a.md": text + "\n"})
    found = check_docs.check_prose(tmp_path)
    assert len(found) == (expected is not None), found
    assert expected is None or found[0].startswith(expected)


def test_exceptions_are_few_and_say_why():
    assert len(pages.EXEMPT) <= 10 and all(pages.EXEMPT.values())


@pytest.mark.parametrize(
    "subject, expected",
    [
        ("cpu: pack the left block once", None),
        ("docs/api.md, up_proj: embed it", None),
        ("cpu: " + "x" * 67, None),
        ("cpu: " + "x" * 68, "subject of 73 characters, allowed: 72"),
        ("cpu: pack it.", "ends with a full stop"),
        ("pack the left block once", 'not "area: imperative"'),
        ("Cpu: pack it", 'not "area: imperative"'),
        ("cpu:pack it", 'not "area: imperative"'),
        ("cpu: ", 'not "area: imperative"'),
        ("cpu: added a path", 'starts with "added"'),
        ("cpu: Merging two paths", 'starts with "Merging"'),
        ("cpu: fixes a path", 'starts with "fixes"'),
        *((f"cpu: {word} it", None) for word in (
            "need", "feed", "seed", "exceed", "shed", "bring", "string", "ring", "pass", "process",
            "bias", "focus", "speed")),
    ],
)  # fmt: skip
def test_commit_subjects(subject, expected):
    found = check_commits.problems(subject)
    assert len(found) == (expected is not None)
    assert expected is None or found[0].startswith(expected)


def test_commits_are_checked_from_the_base_on(history, monkeypatch, capsys):
    root, base, git = history
    monkeypatch.setattr(check_commits, "__file__", str(root / "tools" / "check_commits.py"))
    assert check_commits.main() == 0
    assert "commits: subjects NOT CHECKED: " in capsys.readouterr().out
    monkeypatch.setattr(check_commits, "subjects", lambda root: changes.subjects(root, base))
    git("commit", "-q", "--allow-empty", "-m", "cpu: pack it")
    assert check_commits.main() == 0
    assert "commits: 1 subjects" in capsys.readouterr().out
    git("switch", "-q", "-c", "side", base)
    git("commit", "-q", "--allow-empty", "-m", "cpu: packed it", "-m", "Why.")
    git("switch", "-q", "-")
    git("merge", "-q", "--no-ff", "-m", "Merged.", "side")
    assert check_commits.main() == 1
    assert re.fullmatch(
        r'[0-9a-f]{7,}: starts with "packed", allowed: an imperative: "cpu: packed it"\n',
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<!-- run -->\n```sh\nexit 3\n```\n", "exit status 3"),
        ("<!-- run -->\n```python\nassert False\n```\n", "exit status 1"),
        ("<!-- run -->\n```java\n```\n", "cannot run 'java'"),
        ("<!-- run -->\nno block\n", "1 marks, 0 runnable blocks"),
        ("```sh\nnot marked\n```\n", "0 marks"),
    ],
)
def test_snippets(tmp_path, text, expected):
    plant(tmp_path, {"bad.md": text, "good.md": "<!-- run -->\n\n```sh\ntrue\n```\n"})
    run_snippets.main(tmp_path, tmp_path / "good.md")
    with pytest.raises(SystemExit, match=expected):
        run_snippets.main(tmp_path, tmp_path / "bad.md")


GATHER_LOOP = """
\t\tFunction : kernel
        /*0000*/                   IMAD.WIDE R2, R3, 0x10, R4 ;
        /*0010*/                   UIMAD.WIDE.U32 UR8, UR10, 0x80, UR8 ;
        /*0020*/                   LEA R6, P0, R7, R8, 0x4 ;
        /*0030*/              @!P0 LDGSTS.E.BYPASS.128 [R5], desc[UR4][R6.64] ;
        /*0040*/                   ARRIVES.LDGSTSBAR.64.ARVCNT [UR41+0x38040] ;
        /*0050*/               @P1 BRA 0x10 ;
        /*0060*/                   EXIT ;
"""
WIDE = ("LEA R6, P0,", "IMAD.WIDE.U32 R6,")


@pytest.mark.parametrize(
    "sass, loops, problem",
    [
        (GATHER_LOOP, 1, None),
        (GATHER_LOOP.replace(*WIDE), 1, "kernel: 1 times IMAD.WIDE"),
        # What consumers do between their products is not judged.
        (GATHER_LOOP.replace(*WIDE).replace("UIMAD", "HGMMA"), 0, None),
        # No copy in it: no gather.
        (GATHER_LOOP.replace(*WIDE).replace("LDGSTS.E", "LDG.E"), 0, None),
        (GATHER_LOOP.replace("BRA 0x10", "BRA 0x60"), 0, None),
        # The loop around is another one, and may.
        (GATHER_LOOP.replace("EXIT", "@P2 BRA 0x0"), 1, None),
        (GATHER_LOOP + GATHER_LOOP.replace("kernel", "other").replace(*WIDE), 2, "other: 1 times"),
        (GATHER_LOOP.replace("EXIT", "NOP ;\n/*0060*/ " * 300 + "EXIT"), 1, None),
        (GATHER_LOOP.replace("@P1", "NOP ;\n/*0050*/ " * 300 + "@P1"), 0, "kernel: gathers in no"),
    ],
)
def test_machine_code(sass, loops, problem):
    found, problems = check_machine_code.judge(sass)
    assert found == loops
    assert len(problems) == (problem is not None)
    assert problem is None or problems[0].startswith(problem)


TILE_TIMES_LOG = """# First
$ command
## 8,16,32,2,1
cuda.up_proj.128x256      0.001     0.000  1.0  2.0          -         -     0.50
cuda.up_proj.128x128      0.001     0.000  2.0  2.0          -         -     0.50
cuda.up_proj.192x256      0.001     0.000  4.0  2.0          -         -     0.50
sm90.down_proj.128x256      0.001     0.000  1.0  -          -         -     0.50
sm90.down_proj.128x192      0.001     0.000  4.0  2.0          -         -     0.50
## 8,16,32,2,2
cuda.up_proj.128x256      0.001     0.000  1.0  2.0          -         -     0.50
"""
TILES = [["up_proj", "192x256", "128x256", "128x128"], ["down_proj", "128x256", "128x192"]]
TILE_TIMES = "    // First.\n    {8, 16, 32, 2, 1, {{4, 16, 8}, {8, 2}}},\n"


def test_tile_times_come_from_flops_and_leave_broken_shapes_out():
    assert tile_times.table(TILE_TIMES_LOG, TILES) == TILE_TIMES


def test_tile_times_finds_a_header_that_differs(tmp_path, monkeypatch, capsys):
    header, log = tmp_path / "tests/tile_times.h", tmp_path / "docs/findings/tile-times.log"
    names = ", ".join("{" + ", ".join(f'"{word}"' for word in words) + "}" for words in TILES)
    text = f"{names}\n{tile_times.BEGIN}{TILE_TIMES}{tile_times.END}after\n"
    plant(tmp_path, {"tests/tile_times.h": text, "docs/findings/tile-times.log": TILE_TIMES_LOG})
    for name, path in [("ROOT", tmp_path), ("HEADER", header), ("LOG", log)]:
        monkeypatch.setattr(tile_times, name, path)
    monkeypatch.setattr(sys, "argv", ["tile_times.py", "--check"])
    assert tile_times.main() == 0
    changed = text.replace("{4, 16, 8}", "{4, 16, 9}")
    header.write_text(changed)
    assert tile_times.main() == 1
    assert header.read_text() == changed
    printed = capsys.readouterr().out
    assert "tests/tile_times.h is not what docs/findings/tile-times.log says" in printed
    monkeypatch.setattr(sys, "argv", ["tile_times.py"])
    assert tile_times.main() == 0
    assert header.read_text() == text


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """The documents with figures, the pictures, and receipts, where a test may change them."""
    receipt = json.loads((figures.ROOT / figures.RECEIPT).read_text())
    names = [figures.RECEIPT, *figures.documents(receipt)]
    made = figures.drawn()
    names += list(made)
    plant(tmp_path, {name: (figures.ROOT / name).read_text() for name in names})
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "drawn", lambda: made)  # they take half a second
    return tmp_path


@pytest.mark.parametrize(
    "name, what, pattern",
    [
        ("README.md", "figure", r"(?<=\| cuBLAS \| interleaved \| )0"),
        ("README.md", "figure", r"(?<=\| `torch.bmm` \| steady state \| )0"),
        ("docs/performance.md", "figure", r"(?<=32768, 4096, 2048, 64, 4 \| )\d"),
        ("docs/performance.md", "figure", r"(?<=7B-n256 \| steady state \| )\d"),
        ("docs/kernels/up_proj.md", "figure", r"(?<=7B-n256 \| )\d"),
        ("docs/kernels/aggregate.md", "figure", r"(?<=7B-n256 \| )\d"),
        ("docs/kernels/metadata.md", "figure", r"(?<=\| top_k and metadata \| )\d"),
        ("docs/findings/sustained.md", "figure", r"(?<=\n\| interleaved \| )0"),
        ("README.md", "place", r"cuBLAS \| interleaved \| "),
        ("docs/findings/sustained.md", "place", r"interleaved \|"),
        ("docs/throughput.svg", "figure", r"(?<=viewBox=.0 0 )\d"),
        ("docs/activation-memory.svg", "figure", r"(?<=viewBox=.0 0 )\d"),
    ],
)
def test_figures_finds_documents_that_the_receipt_does_not_back(
    documents, monkeypatch, capsys, name, what, pattern
):
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 0
    text = (documents / name).read_text()
    changed, count = re.subn(pattern, "9" if what == "figure" else "", text)
    assert count == 1
    (documents / name).write_text(changed)
    if what == "place":
        with pytest.raises(SystemExit, match=f"figures: {name}: 0 places"):
            figures.main()
        return
    assert figures.main() == 1
    assert f"{name} is not what the receipt says" in capsys.readouterr().out
    assert (documents / name).read_text() == changed
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0
    assert (documents / name).read_text() == text


def test_logs_name_no_folder_of_their_machine(tmp_path):
    folder = tmp_path / "packed"
    log = (
        f"$ {folder}/sonicmoe bench\n$ {sys.executable} -m pytest\nrootdir: {gpu_check.ROOT}\n"
        f"{gpu_check.ROOT}/python/tests/test_cuda.py\n{sys.prefix}/lib/torch/cuda.py:1: warning\n"
    )
    assert gpu_check.without_paths(log, folder) == (
        "$ build-gpu/sonicmoe bench\n$ python3 -m pytest\nrootdir: .\n"
        "python/tests/test_cuda.py\nlib/torch/cuda.py:1: warning\n"
    )


@pytest.mark.parametrize(
    ("codes", "state"),
    [
        ([0], "clean"),
        ([0, 0], "clean"),
        ([0, 9], "errors"),
        ([124, 9], "errors"),
        ([0, 124], "not finished"),
        ([0, -11], "exit -11"),
        ([127, 0], "exit 127"),
    ],
)
def test_a_sanitizer_is_clean_if_all_its_processes_are(codes, state):
    assert gpu_check.sanitizer_state(codes) == state


def test_a_receipt_is_made_in_three_calls(tmp_path, monkeypatch):
    card = ["NVIDIA H200"]
    monkeypatch.setattr(gpu_check, "output", lambda *_, **__: f"{card[0]}, 580.1\n")
    monkeypatch.setattr(gpu_check, "weak_bound", lambda *_: "")
    rows = {"bench": [1], "steady_state": [], "torch_bmm": [], "copy_TBps": 4.2}
    monkeypatch.setattr(gpu_check.Run, "bench_part", lambda *_: rows)
    tests = {"tests": {"passed": 7}, "python": {}}
    monkeypatch.setattr(gpu_check.Run, "tests_part", lambda *_: tests)
    clean = {tool: "clean" for tool in ("memcheck", "racecheck")}
    found = {"memcheck": "clean", "racecheck": "errors"}
    monkeypatch.setattr(gpu_check.Run, "sanitizers", lambda *_: found)
    (tmp_path / "manifest.json").write_text('{"digest": "d"}')

    def run(part):
        return gpu_check.Run(tmp_path).receipt(part, False)

    assert run("tests") == 0 and run("sanitizers") == 1
    assert run("bench") == 1  # a sanitizer was not clean
    found |= clean
    assert run("sanitizers") == 0 and run("bench") == 0
    receipt = json.loads((tmp_path / "receipt" / "h200.json").read_text())
    assert "good" not in receipt
    assert receipt["sanitizer"] == clean and receipt["digest"] == "d" and receipt["bench"] == [1]
    assert receipt["tests"] == {"passed": 7} and receipt["device"] == "NVIDIA H200"
    card[0] = "NVIDIA H100"
    assert run("tests") == 0
    with pytest.raises(SystemExit, match="sanitizers.json: got NVIDIA H200, allowed: NVIDIA H100"):
        run("bench")
    # Parts of other programs, and none: the committed receipt must not take their place.
    (tmp_path / "manifest.json").write_text('{"digest": "e"}')
    with pytest.raises(SystemExit, match="tests.json: got digest d, allowed: e"):
        run("bench")
    (tmp_path / "tests.json").unlink()
    with pytest.raises(SystemExit, match="tests.json: got none, allowed: what --part tests left"):
        run("bench")


def test_a_receipt_has_some_tests_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "output", lambda *_, **__: "NVIDIA H100, 580.1\n")
    old = {"device": "NVIDIA H100", "pytest_exit": 0, "errors": [], "python": {}, "kernels": ["a"]}
    old |= {"tests": {"passed": 2}, "test_names": {"A.a": "passed", "B.b": "passed"}}
    old |= {"sanitizer": {"memcheck": "clean", "racecheck": "errors"}}
    monkeypatch.setattr(gpu_check, "UNTIMED", tmp_path / "untimed.json")
    gpu_check.UNTIMED.write_text(json.dumps(old))
    ran, state = [], ["passed"]

    def gtest(self, names, shards=1):
        ran.append(names)
        if state[0] == "crashed":
            self.good = False
            return
        self.tests |= {"B.b": state[0], "C.c": "passed"}

    monkeypatch.setattr(gpu_check.Run, "gtest", gtest)
    monkeypatch.setattr(gpu_check.Run, "pytest", lambda self: ran.append("pytest") or 0)
    monkeypatch.setattr(gpu_check, "cuda_kernels", lambda *_: ["a", "c"])
    monkeypatch.setattr(
        gpu_check.Run, "sanitizers", lambda *_: dict.fromkeys(old["sanitizer"], "clean")
    )

    (tmp_path / "manifest.json").write_text('{"digest": "d"}')

    def run(part):
        code = gpu_check.Run(tmp_path).receipt(part, False, "B.*:C.*")
        return code, json.loads((tmp_path / f"{part}.json").read_text())

    code, made = run("tests")
    assert code == 0 and made["test_names"] == {"A.a": "passed", "B.b": "passed", "C.c": "passed"}
    assert made["tests"]["passed"] == 3 and made["tests_again"] == "B.*:C.*"
    assert made["kernels"] == ["a", "c"] and ran[-1] == gpu_check.ALONE
    assert sorted(ran[:2]) == [f"B.*:C.*-{gpu_check.ALONE}", "pytest"]
    assert run("tests")[1]["tests_again"] == "B.*:C.* and B.*:C.*"
    state[0] = "crashed"  # the names of the earlier call do not stand for this one
    assert run("tests")[0] == 1
    state[0] = "failed"
    code, made = run("tests")
    assert code == 1 and made["tests"] == {"passed": 2, "failed": 1, "skipped": 0}
    code, made = run("sanitizers")  # the receipt's own error stays
    assert code == 1 and made["sanitizer"] == old["sanitizer"]
    old["sanitizer"]["racecheck"] = "clean"
    gpu_check.UNTIMED.write_text(json.dumps(old))
    (tmp_path / "sanitizers.json").unlink()
    code, made = run("sanitizers")
    assert code == 0 and set(made["sanitizer"].values()) == {"clean"}
    old["device"] = "NVIDIA H200"
    gpu_check.UNTIMED.write_text(json.dumps(old))
    (tmp_path / "tests.json").unlink()
    with pytest.raises(SystemExit, match="untimed.json: got NVIDIA H200, allowed: NVIDIA H100"):
        run("tests")


KERNEL = {"code": b"add", "constants": b"1.0", "registers": 32, "shared": 2048, "target": 64}


def cubin(kernels, table=b"", architecture=90):
    """An ELF file with what a digest is made of, of (name, properties)."""
    names, symbols, registers = b"\0", bytes(24), b""
    sections = [(".nv.global.init", 1, table)]
    for i, (name, kernel) in enumerate(kernels, 1):
        symbols += struct.pack("<I4xQQ", len(names), kernel["target"], 8)
        names += name.encode() + b"\0"
        registers += struct.pack("<BBHII", 4, 0x2F, 8, i, kernel["registers"])
        sections += [
            (f".text.{name}", 1, kernel["code"]),
            (f".nv.constant2.{name}", 1, kernel["constants"]),
            (f".nv.info.{name}", 1, struct.pack("<BBHII", 4, 0x0A, 8, i, 96) + b"\3\x1b\x40\0"),
            (f".nv.shared.{name}", 8, bytes(kernel["shared"])),
            (f".rela.text.{name}", 4, struct.pack("<QQq", 16, i << 32 | 2, 0)),
        ]
    sections += [(".nv.info", 1, registers), (".symtab", 2, symbols), (".strtab", 3, names)]
    strings = "".join(f"{name}\0" for name, _, _ in sections) + ".shstrtab\0"
    sections.append((".shstrtab", 3, strings.encode()))
    headers, contents, at = b"", b"", 0
    for name, kind, content in sections:
        headers += struct.pack("<IIQQQQ24x", at, kind, 0, 0, 64 + len(contents), len(content))
        contents += content if kind != 8 else b""
        at += len(name) + 1
    begin = struct.pack("<40xQI6x3H", 64 + len(contents), architecture, 64, len(sections),
                        len(sections) - 1)  # fmt: skip
    return begin + contents + headers


def test_a_digest_of_machine_code_has_no_names():
    multiply = KERNEL | {"code": b"multiply"}
    first = machine_code.digests(cubin([("_Z3add", KERNEL), ("_Z8multiply", multiply)]))
    other = machine_code.digests(cubin([("_Z5times", multiply), ("_Z1a", KERNEL)]))
    assert first == {"_Z3add": other["_Z1a"], "_Z8multiply": other["_Z5times"]}
    assert first["_Z3add"] != first["_Z8multiply"]
    # What the driver keeps is no shared memory of the kernel's; it may have no section.
    reserved = cubin([("_Z3add", KERNEL | {"shared": 1024})])
    without = reserved.replace(b".nv.shared._Z3add", b".nv.shared._Zsome")
    assert machine_code.digests(reserved) == machine_code.digests(without)


@pytest.mark.parametrize("change", [
    {"code": b"sub"}, {"constants": b"2.0"}, {"registers": 40}, {"shared": 4096}, {"target": 72},
    {"table": b"new"}, {"architecture": 100},
])  # fmt: skip
def test_a_digest_of_machine_code_has_all_that_is_executed(change):
    of_file = {name: change[name] for name in change if name not in KERNEL}
    changed = cubin([("_Z3add", KERNEL | change)], **of_file)
    assert machine_code.digests(changed) != machine_code.digests(cubin([("_Z3add", KERNEL)]))


@pytest.fixture
def receipt(tmp_path, monkeypatch):
    """A receipt of two kernels and two tests, and a build that it covers, for a test to change."""
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "RECEIPT", tmp_path / "receipt.json")
    monkeypatch.setattr(gpu_check, "UNTIMED", tmp_path / "untimed.json")
    monkeypatch.setattr(gpu_check, "RENAMED", tmp_path / "renamed.json")
    monkeypatch.setattr(gpu_check, "PENDING", tmp_path / "pending.md")
    build = {
        "digest": "sources",
        "machine_code": {"a.cu: up": "code of up", "a.cu: down": "code of down"},
        "kernels": ["cuda.up", "cuda.down"],
        "tests": ["Exact.Quick/cuda_up", "Exact.Quick/cuda_down"],
    }
    receipt = {
        **{name: build[name] for name in ("digest", "machine_code", "kernels")},
        "test_names": dict.fromkeys(build["tests"], "passed"),
        "pytest_exit": 0,
        "sanitizer": {},
        "bench": [{"config": "7B-n256", "what": "total", "dense_bound_ms": 1.0}],
        "steady_state": [{"config": "7B-n256", "what": "total"}],
        "torch_bmm": [{"config": "7B-n256"}],
        "python": {"dense_bound_ms": 1.0},
    }
    plant(tmp_path, {"receipt.json": json.dumps(receipt)})
    monkeypatch.setattr(gpu_check, "digest", lambda _: build["digest"])
    monkeypatch.setattr(machine_code, "kernels", lambda _: build["machine_code"])
    monkeypatch.setattr(gpu_check, "listed_tests", lambda _: build["tests"])
    monkeypatch.setattr(gpu_check, "cuda_kernels", lambda *_: build["kernels"])
    return build


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({"a.cu: up": "code of up", "a.cu: down": "code of down"}, None),
        ({"b.cu: rise": "code of up", "a.cu: down": "code of down"}, None),
        ({"a.cu: up": "code of up"}, None),
        ({"a.cu: up": "new", "a.cu: down": "code of down"}, "machine code of a.cu: up: not"),
        ({"a.cu: up": "code of up", "a.cu: new": "new"}, "machine code of a.cu: new: not"),
        # The names are the receipt's, so this is no renaming.
        ({"a.cu: up": "code of down"}, "machine code of a.cu: up: not"),
    ],
)
def test_a_receipt_covers_changed_sources_of_equal_machine_code(
    tmp_path, capsys, receipt, kernels, expected
):
    assert gpu_check.verify(tmp_path) == 0
    assert "sources changed" not in capsys.readouterr().out
    receipt |= {"digest": "other sources", "machine_code": kernels}
    assert gpu_check.verify(tmp_path) == (expected is not None)
    text = capsys.readouterr().out
    if expected is None:
        assert f"the machine code of all {len(kernels)} kernels is equal" in text
    else:
        assert f"the machine code of 1 of {len(kernels)} kernels\n" in text
        assert text.count("machine code of a.cu") == 1 and expected in text


def test_a_receipt_without_times_covers_a_build_too(tmp_path, capsys, receipt):
    receipt |= {"digest": "other sources", "machine_code": {"a.cu: up": "new"}}
    assert gpu_check.verify(tmp_path) == 1
    made = json.loads(gpu_check.RECEIPT.read_text()) | receipt
    made |= {"test_names": dict.fromkeys(receipt["tests"], "passed"), "bench": []}
    gpu_check.UNTIMED.write_text(json.dumps(made))
    assert gpu_check.verify(tmp_path) == 0
    assert "untimed.json covers this build" in capsys.readouterr().out
    gpu_check.UNTIMED.write_text(json.dumps(made | {"sanitizer": {"memcheck": "errors"}}))
    assert gpu_check.verify(tmp_path) == 1


KERNELS, TESTS = [["sm90.", "cuda."]], [["/sm90_", "/cuda_"], ["Dealt.", "Exact."]]


@pytest.mark.parametrize(
    ("kernels", "tests", "table", "expected"),
    [
        ("sm90.up", "Exact.Quick/cuda_up", {"kernels": KERNELS}, []),
        ("cuda.up", "Dealt.Quick/sm90_up", {"tests": TESTS}, []),
        ("cuda.up", "Exact.Quick/cuda_up", {"kernels": [], "tests": []}, []),
        ("sm90.up", "Exact.Quick/sm90_up", {},
         ["test Exact.Quick/sm90_up: not passed", "kernel sm90.up: not in the receipt"]),
        ("sm90.new", "Exact.Quick/cuda_up", {"kernels": KERNELS},
         ["kernel sm90.new: not in the receipt"]),
        # The receipt's kernel is still there, so this one is new.
        ("cuda.up sm90.up", "Exact.Quick/cuda_up", {"kernels": KERNELS},
         ["kernel sm90.up: not in the receipt"]),
        # One kernel of the receipt does not stand for two.
        ("sm90.up new.up", "", {"kernels": [*KERNELS, ["new.", "cuda."]]},
         ["kernel new.up: not in the receipt"]),
        ("cuda.up", "Exact.Quick/sm90_up", {"kernels": KERNELS, "tests": TESTS},
         ["renamed.json: no test needs Dealt. -> Exact.",
          "renamed.json: no kernel needs sm90. -> cuda."]),
    ],
)  # fmt: skip
def test_renamed_kernels_and_tests_are_those_of_the_receipt(
    tmp_path, receipt, kernels, tests, table, expected
):
    plant(tmp_path, {"renamed.json": json.dumps(table)})
    receipt |= {"kernels": kernels.split(), "tests": tests.split()}
    assert gpu_check.problems(tmp_path) == expected


def test_a_renamed_test_that_failed_has_not_passed(tmp_path, receipt):
    saved = gpu_check.RECEIPT.read_text()
    gpu_check.RECEIPT.write_text(saved.replace('up": "passed"', 'up": "failed"'))
    plant(tmp_path, {"renamed.json": json.dumps({"tests": TESTS[:1]})})
    receipt["tests"] = ["Exact.Quick/sm90_up"]
    assert gpu_check.problems(tmp_path) == ["test Exact.Quick/sm90_up: not passed"]
