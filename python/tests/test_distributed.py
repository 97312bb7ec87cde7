"""sonicmoe.distributed on two and four processes, beside one."""

import subprocess
import sys

import pytest
from distributed_checks import CHECKS
from ranks import PASSED, outcome, run_checks
from torch.distributed.device_mesh import DeviceMesh

from sonicmoe.distributed import ExpertParallel, Transport
from sonicmoe.distributed._dispatch import max_rows


@pytest.fixture(scope="module", params=[2, 4])
def ran(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_checks(request.param, folder, CHECKS)
    return request.param, folder


@pytest.mark.parametrize("name", CHECKS)
def test_ranks(ran, name):
    ranks, folder = ran
    said = outcome(ranks, folder, name)
    assert said == [PASSED] * ranks, "\n".join(said)


def test_options():
    for options, text in (
        ({"name": "ring"}, "^transport: got 'ring', allowed: 'auto', 'gather', 'all_to_all'"),
        ({"max_tokens": 0}, "^max_tokens: got 0, allowed: 1 and more"),
        ({"name": "all_to_all", "max_tokens": 4}, "^max_tokens: got 4, allowed: None with 'all_to"),
        ({"name": "all_to_all", "keep_gathered": True}, "^keep_gathered: got True, allowed: False"),
    ):
        with pytest.raises(ValueError, match=text):
            Transport(**options)
    with pytest.raises(TypeError, match="^keep_gathered: got 1, allowed: True, False"):
        Transport(keep_gathered=1)
    with pytest.raises(TypeError, match="^peer_copies: got 'yes', allowed: True, False"):
        Transport(peer_copies="yes")
    with pytest.raises(ValueError, match="^loss_counts: got 'all', allowed: 'local', 'global'"):
        ExpertParallel(loss_counts="all")


def test_room_for_pairs():
    """Of two ranks with pairs for rank 1: H's rows, and never 0, which would be no limit."""
    for pairs, rows in (((0, 0), 1024), ((1000, 24), 1024), ((1025, 0), 2048), ((0, 9000), 9216)):
        assert max_rows([[3, 3, 5000, of_rank, 4, 6] for of_rank in pairs], 1) == rows


def test_needs_a_process_group():
    mesh = DeviceMesh.__new__(DeviceMesh)
    with pytest.raises(RuntimeError, match="^mesh: got no process group, allowed: .*torchrun"):
        ExpertParallel()._apply(None, mesh)


def test_not_imported_by_sonicmoe():
    code = "import sys, sonicmoe; sys.exit('sonicmoe.distributed' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
