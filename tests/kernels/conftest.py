"""How the tests start kernels: on the GPU where there is one, else in Triton's interpreter on the host."""

import pytest
import torch

from kernels import launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where tensors of a kernel test live. Without a GPU, CPU tensors are sent to the interpreter for this one test:
    the only place from which that happens."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        assert launch.lack(torch.device("cuda:0")) is None
        return torch.device("cuda:0")
    assert launch.interpreted()
    monkeypatch.setattr(launch, "lack", lambda device: None)
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
