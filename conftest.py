"""For all Python tests of the repository."""

import os
import tempfile

# torch.compile keeps its output on disk. The keys do not cover our operators' schemas: once a schema
# has changed, an old entry would call the operator in its old form.
# Processes that pytest-xdist starts share the folder of the one that started them, and all of .ci/run
# share one.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="sonicmoe-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name

# Without vectors inductor does not probe the processor, which takes 20 s a process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
