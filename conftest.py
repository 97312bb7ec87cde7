"""For all Python tests of the repository."""

import os
import tempfile

# torch.compile keeps its output on disk. The keys do not cover our operators' schemas: once a schema
# has changed, an old entry would call the operator in its old form.
# Processes that pytest-xdist starts share the folder of the one that started them, and all tests of
# one .ci/run share a folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="sonicmoe-inductor-")
    _folder = os.environ.get("SONICMOE_CI_INDUCTOR_CACHE", _compiled.name)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _folder

# Without vectors inductor does not probe the processor, which takes 20 s a process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
