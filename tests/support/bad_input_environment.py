"""Where bad inputs are tried: a scratch folder, and addresses at which nobody answers.

To be imported first: the libraries read these variables when they are imported.
"""

import os
import tempfile
from pathlib import Path

SCRATCH = Path(tempfile.mkdtemp(prefix="skipdecode-bad-input-"))
_NOBODY = "http://127.0.0.1:9"

for _name in ("HF_TOKEN", "HF_HUB_OFFLINE", "WANDB_API_KEY", "WANDB_MODE"):
    os.environ.pop(_name, None)
for _name in ("HOME", "HF_HOME", "HF_DATASETS_CACHE", "WANDB_CACHE_DIR"):
    os.environ[_name] = str(SCRATCH / "caches" / _name)
os.environ |= {"HF_ENDPOINT": _NOBODY, "WANDB_BASE_URL": _NOBODY, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
