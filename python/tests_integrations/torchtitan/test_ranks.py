"""torchtitan's expert parallelism on two gloo processes, with a transport of sonicmoe's."""

import pytest
from ranks import PASSED, outcome, run_checks
from ranks_checks import CHECKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    run_checks(2, made, CHECKS)
    return made


@pytest.mark.parametrize("name", CHECKS)
def test_ranks(folder, name):
    said = outcome(2, folder, name)
    assert said == [PASSED] * 2, "\n".join(said)
