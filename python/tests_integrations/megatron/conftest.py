import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def one_rank(tmp_path_factory):
    """Megatron on the CPU: one rank over gloo, and the names that it looks for in vain there."""
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
