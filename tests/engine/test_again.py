"""Saved latents decoded again: the same frames, under other settings, after a stop or a failure, from a file."""

import dataclasses

import pytest
import torch

import app
from engine import again
from engine.engine import Engine
from engine.errors import RequestError
from engine.job import DecodeState
from engine.jobs import Jobs
from engine.latents import save_latents
from engine.preset import load_preset
from engine.record import tags
from engine.settings import DecodeSettings
from engine.sides import Option
from engine.video import probe, read_settings
from tests.double import Double, Pace
from tests.markup import Elements

PRESET = load_preset("tiny")
SMALL = {"height": 64, "width": 96, "frames": 41, "steps": 1}
PLAIN = DecodeSettings("plain", "fp32")


@pytest.fixture
def jobs(tmp_path):
    jobs = Jobs(Double(PRESET), tmp_path / "outputs")
    yield jobs
    jobs.close()


def made(jobs, **values):
    return jobs.wait(jobs.submit(PRESET.request(**({"prompt": "a red circle"} | SMALL | values))))


def stopped_part_of_the_way(jobs):
    jobs.engine.pace = Pace(chunk=0.2)
    job = jobs.submit(PRESET.request(prompt="a", **SMALL))
    for state in jobs.follow(job, 0.02):
        if state.first_frame_seconds:
            jobs.cancel(job)
    jobs.engine.pace = Pace()
    return jobs.snapshot(job)


def test_after_a_stop_decoding_again_brings_the_rest(jobs):
    first = stopped_part_of_the_way(jobs)
    assert first.status == "stopped" and probe(first.video).frames < 41
    second = jobs.wait(jobs.decode_again(first.id, PLAIN))
    assert isinstance(second, DecodeState) and second.source == first.id and second.id != first.id
    assert (second.status, probe(second.video).frames) == ("finished", 41)
    assert second.request == dataclasses.replace(first.request, decode=PLAIN)
    assert [stage.name for stage in second.stages] == ["load", "decode", "file"]
    assert not (second.folder / "latents.safetensors").exists()


def test_of_a_second_decode_the_latents_are_those_of_the_first(jobs):
    first = made(jobs)
    second = jobs.wait(jobs.decode_again(first.id, PLAIN))
    third = jobs.wait(jobs.decode_again(second.id, DecodeSettings("reference", "fp32")))
    assert third.source == first.id and third.latents == first.latents
    jobs.close()
    found = Jobs(jobs.engine, jobs.outputs)
    assert found.snapshot(third.id) == third
    found.close()


def test_what_can_not_be_decoded_again_is_refused_in_words(jobs):
    with pytest.raises(RequestError, match="not known here"):
        jobs.decode_again("20260101-000000-00000000", PLAIN)
    jobs.engine.pace = Pace(step=30)
    running = jobs.submit(PRESET.request(prompt="a", **SMALL))
    with pytest.raises(RequestError, match="still being made"):
        jobs.decode_again(running, PLAIN)
    jobs.cancel(running)
    jobs.wait(running)
    with pytest.raises(RequestError, match="has no latents"):
        jobs.decode_again(running, PLAIN)
    jobs.engine.pace = Pace()
    broken = made(jobs)
    broken.latents.write_bytes(b"no latents")
    with pytest.raises(RequestError, match="not a whole safetensors file"):
        jobs.decode_again(broken.id, PLAIN)


def test_a_file_from_elsewhere_becomes_a_job_that_keeps_it(jobs, tmp_path):
    made_for = PRESET.request(prompt="from afar", seed=9, **SMALL)
    path = tmp_path / "upload.safetensors"
    save_latents(path, torch.zeros(1, 48, 11, 4, 6), tags({"request": made_for.to_json()}))
    request = again.of_file(path, PLAIN, PRESET)
    assert request.video == dataclasses.replace(made_for, decode=PLAIN) and request.source is None
    state = jobs.wait(jobs.submit(request))
    path.unlink()
    assert state.status == "finished" and state.latents == state.folder / "latents.safetensors"
    assert jobs.wait(jobs.decode_again(state.id, PLAIN)).source == state.id


def test_a_file_that_says_nothing_is_known_by_its_size_alone(tmp_path):
    path = tmp_path / "upload.safetensors"
    save_latents(path, torch.zeros(1, 48, 2, 4, 8), {"request": "[]"})
    video = again.of_file(path, PLAIN, PRESET).video
    assert (video.frames, video.height, video.width, video.prompt, video.decode) == (5, 64, 128, "", PLAIN)
    save_latents(path, torch.zeros(1, 48, 1, 4, 2000), {})
    with pytest.raises(RequestError, match="width = 32000"):
        again.of_file(path, PLAIN, PRESET)


def test_the_real_decoder_gives_the_same_frames_and_says_how_it_was_made(toy_preset, tmp_path):
    engine = Engine(toy_preset, "cpu")
    jobs = Jobs(engine, tmp_path)
    request = toy_preset.request(prompt="a red circle", frames=9)
    first = jobs.wait(jobs.submit(request))
    second = jobs.wait(jobs.decode_again(first.id, PLAIN))
    jobs.close()
    engine.close()
    assert (first.status, second.status) == ("finished", "finished"), (first.error, second.error)
    assert second.stats["latents_sha256"] == first.stats["latents_sha256"]
    settings = read_settings(second.video)
    assert settings["request"]["prompt"] == "a red circle"
    assert settings["request"]["decode"] == dataclasses.asdict(PLAIN)
    assert second.video.stat().st_size == pytest.approx(first.video.stat().st_size, rel=0.05)


class WithGpu(Double):
    """A machine whose decoder keeps to a budget."""

    def decoders(self):
        return [Option(DecodeSettings("portable", "fp16"), "a test bench"), *super().decoders()]


def test_a_budget_of_memory_is_asked_for_where_a_decoder_keeps_to_it(tmp_path):
    jobs = Jobs(WithGpu(PRESET), tmp_path)
    page = app.Page(jobs.engine, jobs).generate
    try:
        assert page.budget.visible
        shown = dict.fromkeys((page.model, page.player, page.strip, page.messages, page.details), "")
        first = stopped_part_of_the_way(jobs)
        sent = shown | {page.job: first.id, page.decoder: "portable:fp16"}
        second = jobs.wait(page.decode_again(sent | {page.budget: " 7,5 "})[page.job])
        assert second.request.decode == DecodeSettings("portable", "fp16", memory_gib=7.5)
        for written in ("much", "0", "nan", "1e9"):
            said = page.decode_again(sent | {page.budget: written})[page.messages]
            assert "memory_gib = " in said and "must be a number of GiB" in said
    finally:
        jobs.close()


def test_a_budget_that_a_decoder_would_not_keep_to_is_refused(toy_preset):
    engine = Engine(toy_preset, "cpu")
    for path in ("auto", "plain", "reference"):
        with pytest.raises(RequestError, match=r"memory_gib = 4 is kept to by the paths built and portable alone"):
            engine.decoder(DecodeSettings(path, memory_gib=4))


def test_the_page_offers_it_where_there_are_latents(tmp_path):
    jobs = Jobs(Double(PRESET), tmp_path)
    page = app.Page(jobs.engine, jobs).generate
    try:
        shown = dict.fromkeys((page.model, page.player, page.strip, page.messages, page.details), "")
        first = stopped_part_of_the_way(jobs)
        assert page.look(shown | {page.job: first.id})[page.again].visible
        assert not page.budget.visible
        sent = shown | {page.job: first.id, page.decoder: "reference:fp32", page.budget: ""}
        changed = page.decode_again(sent)
        second = jobs.wait(changed[page.job])
        assert second.request.decode == DecodeSettings("reference", "fp32")
        details = page.look(shown | {page.job: second.id})[page.details]
        assert f"from the latents of {first.id}" in Elements(details).text
        first.latents.unlink()
        assert not page.look(sent | {page.job: second.id})[page.again].visible
        assert "has no latents" in page.decode_again(sent)[page.messages]
        assert "is not known" in page.decode_again(sent | {page.decoder: "magic"})[page.messages]
    finally:
        jobs.close()
