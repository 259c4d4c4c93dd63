"""One thread a worker: the models are tiny, and two cores are all a laptop's CI gives."""

import os
import signal

# A shell starts what runs in its background with SIGINT ignored, and the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402

torch.set_num_threads(1)
