"""For all Python tests of the repository."""

import os
import tempfile

# torch.compile keeps its output on disk. The keys do not cover our operators' schemas: once a schema
# has changed, an old entry would call the operator in its old form.
# Processes that pytest-xdist starts share the folder of the one that started them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="sonicmoe-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name
