"""Which decoder several devices take."""

from __future__ import annotations

import pytest

from engine.agree import agree, lack
from engine.decode_plan import Choice
from engine.errors import RequestError
from engine.rank import Facts, decode_pairs
from engine.settings import DecodeSettings

NAMES = ["rank 0 (a)", "rank 1 (b)"]


def facts(auto="fp32", **lacking):
    """A device whose auto is plain in this precision; lacking: precision -> why."""
    choices = {pair: "there is none" for pair in decode_pairs()}
    for precision in ("fp32", "bf16"):
        choices["auto", precision] = choices["plain", precision] = lacking.get(precision) or Choice(
            "plain", precision, "asked for"
        )
    choices["auto", "auto"] = choices["plain", "auto"] = Choice("plain", auto, "the fastest")
    choices["reference", "fp32"] = choices["reference", "auto"] = Choice("reference", "fp32", "asked for")
    return Facts("a device", "cpu", choices, {})


def test_all_take_what_all_have():
    assert agree(DecodeSettings(), [facts(), facts()], NAMES)[:2] == ("plain", "fp32")
    assert agree(DecodeSettings(), [facts(), facts()], NAMES).devices == 2


def test_one_that_lacks_a_decoder_makes_all_take_the_common_one_and_the_reason_says_who():
    choice = agree(DecodeSettings(), [facts("bf16"), facts("fp32", bf16="no compiler")], NAMES)
    assert choice[:2] == ("plain", "fp32") and choice.devices == 2
    assert "rank 1 (b): no compiler" in choice.reason


def test_nothing_in_common_is_an_error_that_names_the_device():
    with pytest.raises(RequestError, match=r"rank 1 \(b\): no compiler"):
        agree(DecodeSettings(precision="bf16"), [facts(), facts(bf16="no compiler")], NAMES)


def test_a_decoder_that_turns_out_to_be_missing_is_left_out():
    known = [facts("bf16"), facts("bf16")]
    assert agree(DecodeSettings(), known, NAMES)[:2] == ("plain", "bf16")
    lack(Choice("plain", "bf16", ""), known[1], "it would not load")
    choice = agree(DecodeSettings(), known, NAMES)
    assert choice[:2] == ("plain", "fp32") and "rank 1 (b): it would not load" in choice.reason


@pytest.mark.parametrize("settings", [DecodeSettings("reference"), DecodeSettings(devices="one")], ids=str)
def test_one_device_alone(settings):
    choice = agree(settings, [facts(), facts()], NAMES)
    assert choice.devices == 1 and "rank 0 (a) alone" in choice.reason
