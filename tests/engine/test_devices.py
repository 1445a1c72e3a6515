"""Lists of devices as people write them."""

from __future__ import annotations

import pytest
import torch

from engine import devices
from engine.errors import RequestError

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """So many GPUs, without opening any."""
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("text", "there", "expected"),
    [
        ("auto", 0, [CPU]),
        ("auto", 4, [torch.device("cuda", 0)]),
        ("cpu", 4, [CPU]),
        ("cpu:4", 0, [CPU] * 4),
        ("0", 2, [torch.device("cuda", 0)]),
        ("cuda", 2, [torch.device("cuda", 0)]),
        ("cuda:1", 2, [torch.device("cuda", 1)]),
        ("0*2", 1, [torch.device("cuda", 0)] * 2),
        ("cuda:1*3", 2, [torch.device("cuda", 1)] * 3),
        ("0,1,2", 3, [torch.device("cuda", n) for n in range(3)]),
        (" CUDA:2, cuda:0 ", 3, [torch.device("cuda", 2), torch.device("cuda", 0)]),
    ],
)
def test_what_people_write(gpus, text, there, expected):
    gpus(there)
    assert list(devices.parse_devices(text)) == expected


@pytest.mark.parametrize(
    ("text", "there", "words"),
    [
        ("0", 0, "NVIDIA GPU"),
        ("0,3", 2, "no GPU 3; this machine has 2"),
        ("0,1,0", 2, r"GPU 0 more than once.*0\*2 has two processes share it, which gains nothing"),
        ("0*2", 0, "NVIDIA GPU"),
        ("1*2", 1, "no GPU 1"),
        ("0*9", 1, "1 to 8"),
        ("0*", 1, "1 to 8"),
        ("0,1*2", 2, "not known"),
        ("cpu*2", 2, "takes the CPU as one GPU"),
        ("0,cpu", 2, "takes the CPU as one GPU"),
        ("cpu,0", 2, "takes the CPU as one GPU"),
        ("cpu:9", 0, "1 to 8"),
        ("cpu:0", 0, "1 to 8"),
        ("cpu:", 0, "1 to 8"),
        ("cpu:x", 0, "1 to 8"),
        ("", 2, "not known"),
        ("0,,1", 2, "not known"),
        ("-1", 2, "not known"),
        ("mps", 2, "not known"),
        ("0,1,2,3,4,5,6,7,8", 9, "8 at most"),
    ],
)
def test_what_is_refused(gpus, text, there, words):
    gpus(there)
    with pytest.raises(RequestError, match=words):
        devices.parse_devices(text)


def test_the_switch_lets_auto_take_every_gpu(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setattr(devices, "AUTO_SPREADS", True)
    assert len(devices.parse_devices("auto")) == 2


def test_the_environment_names_devices(monkeypatch):
    monkeypatch.setenv("ENGINE_DEVICES", "cpu:2")
    assert devices.devices_from_environment() == "cpu:2"
    monkeypatch.delenv("ENGINE_DEVICES")
    assert devices.devices_from_environment() == "auto"
