"""Whether this is a ZeroGPU Space. Import it before anything that imports torch: there `spaces` has to come first."""

from __future__ import annotations

import os

HERE = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")
# Only what goes through Gradio's queue tells the Space whose visitor asks, and a GPU is lent on the visitor's quota.
ASKING = {"queue": HERE}

if HERE:
    import spaces  # noqa: F401 - it patches torch, so that weights can be put on a GPU that is not there yet
