"""Checks that are made once for arguments of one form."""

import pytest
import torch

from kernels import checks
from kernels.checks import once


@pytest.fixture
def calls():
    return []


@pytest.fixture
def check(calls):
    @once
    def check(x, size):
        calls.append((x, size))
        checks.check_shape("x", x, (size, -1))

    return check


def test_a_form_is_checked_once_whatever_the_numbers(check, calls):
    for _ in range(3):
        check(torch.randn(2, 3), 2)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "x, size",
    [
        (torch.zeros(2, 4), 2),
        (torch.zeros(3, 2).T, 2),
        (torch.zeros(2, 3).half(), 2),
        (torch.zeros(2, 3, device="meta"), 2),
    ],
    ids=["shape", "strides", "dtype", "device"],
)
def test_another_form_is_checked_again(check, calls, x, size):
    check(torch.zeros(2, 3), 2)
    check(x, size)
    assert len(calls) == 2


def test_what_is_refused_is_refused_every_time(check, calls):
    check(torch.zeros(2, 3), 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="x has shape"):
            check(torch.zeros(2, 3), 3)
    assert len(calls) == 3


def test_what_is_remembered_has_a_limit(check, calls, monkeypatch):
    monkeypatch.setattr(checks, "REMEMBERED", 2)
    for columns in (1, 2, 3, 1):
        check(torch.zeros(2, columns), 2)
    assert len(calls) == 4
