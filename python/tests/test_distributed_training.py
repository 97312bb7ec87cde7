"""FSDP2 and others beside ExpertParallel on two and four processes, beside one."""

import pytest
from distributed_training_checks import CHECKS
from ranks import PASSED, outcome, run_checks


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
