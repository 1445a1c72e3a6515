"""Train the small model: `python -m presets.tiny.train vae|dit|both --out FOLDER [--from FOLDER] [--smoke]`.

Everything is written to --out as training goes: the VAE, the student (transformer and text encoder) in two files, a
log, contact sheets. --from continues from such a folder or a checkpoint. TRAINING.md has the settings of the model that
ships.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np
import torch

from presets.tiny import world
from presets.tiny.batches import accuracy_of, contact_sheet, generate, mean_scores, scores_of, to_pixels
from presets.tiny.export import unpack
from presets.tiny.flow import NoiseMix
from presets.tiny.gaps import decisive_levels
from presets.tiny.log import TrainingLog
from presets.tiny.pools import LANDSCAPE, Encoder
from presets.tiny.text import PromptIds, new_tokenizer
from presets.tiny.train_dit import DitPlan, Student, Trainer, load_student, make_fast, save_student
from presets.tiny.train_vae import SMOKE, VaePlan, load_vae, measure_vae, save_vae, train_vae
from presets.tiny.vocabulary import caption

VAE_FILE = "vae.safetensors"
SMOKE_DIT = DitPlan(
    seconds=15, begin=0.1, end=0.3, videos=4, batches=(4, 2, 2), probe_every=2, check_every=6, refresh_every=5,
    frames=9, shrink=2, kinds=4, check_count=2, steps=2,
)  # fmt: skip


def main() -> None:
    options = _parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    log = TrainingLog(options.out / "log.jsonl")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if options.stage in ("vae", "both"):
        torch.backends.cudnn.benchmark = device == "cuda"
        _vae(options, device, log)
        torch.backends.cudnn.benchmark = False
    if options.stage in ("dit", "both"):
        _dit(options, device, log)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("vae", "dit", "both"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a few steps at a toy size")
    parser.add_argument("--vae-seconds", type=float, default=VaePlan.seconds)
    parser.add_argument("--dit-seconds", type=float, default=DitPlan.seconds)
    parser.add_argument("--until", type=float, default=DitPlan.until, help="ends then at the latest, as of `date +%%s`")
    parser.add_argument("--fill", type=float, default=DitPlan.fill, help="seconds in which to make --videos")
    parser.add_argument("--begin", type=float, default=DitPlan.begin)
    parser.add_argument("--end", type=float, default=DitPlan.end)
    parser.add_argument("--videos", type=int, default=DitPlan.videos)
    parser.add_argument("--batches", type=int, nargs=3, default=DitPlan.batches, help="stills, clips, whole videos")
    parser.add_argument("--rate", type=float, default=DitPlan.rate)
    parser.add_argument("--noise", type=float, nargs=3, default=NoiseMix.shares, help="shares: high, middle, uniform")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--unmeasured", action="store_true", help="no gaps, checks or report: all time for training")
    parser.add_argument("--evaluate", type=int, default=0, help="prompts to evaluate at the end")
    return parser.parse_args()


def _vae(options: argparse.Namespace, device: str, log: TrainingLog) -> None:
    plan = SMOKE if options.smoke else dataclasses.replace(VaePlan(), seconds=options.vae_seconds)
    vae = train_vae(plan, device, log)
    smoke = {"size": (64, 96), "frames": 9} if options.smoke else {}
    psnr, mean, std = measure_vae(vae, device, 4 if options.smoke else 16, **smoke)
    log.write("vae done", psnr_mean=float(np.mean(psnr)), psnr_worst=min(psnr), psnr=psnr, std=std.tolist())
    save_vae(vae, options.out / VAE_FILE, mean, std)


def _dit(options: argparse.Namespace, device: str, log: TrainingLog) -> None:
    if options.source and (options.source / "transformer").is_dir():
        unpack(options.source, options.out / "start")
        options.source = options.out / "start"
    folder = options.out if (options.out / VAE_FILE).exists() else options.source
    vae, mean, std = load_vae(folder / VAE_FILE, device)
    encoder, ids = Encoder(vae, mean, std, device), PromptIds(new_tokenizer())
    torch.manual_seed(int(1000 * options.begin))
    student = Student(len(ids.tokenizer), ids.start).to(device)
    if options.source and list(options.source.glob("student_*")):
        load_student(student, options.source)
    # cuDNN's attention plans anew for every shape, and there are many lengths of captions.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "cuda" and not options.no_compile:
        make_fast(student.transformer)
    trainer = Trainer(_dit_plan(options), student, encoder, ids, device, log)
    trainer.mix = NoiseMix(tuple(options.noise))
    if not (options.smoke or options.unmeasured):
        log.write("decisive noise levels", table=decisive_levels(encoder))
    trainer.fill_pools()
    trainer.run(lambda: save_student(student, options.out))
    with trainer.averaged():
        save_student(student, options.out)
        if not options.unmeasured:
            _report(trainer, options, log)


def _dit_plan(options: argparse.Namespace) -> DitPlan:
    if options.smoke:
        return SMOKE_DIT
    return dataclasses.replace(
        DitPlan(), seconds=options.dit_seconds, begin=options.begin, end=options.end, videos=options.videos,
        rate=options.rate, measured=not options.unmeasured, until=options.until, fill=options.fill,
        batches=tuple(options.batches),
    )  # fmt: skip


def _report(trainer: Trainer, options: argparse.Namespace, log: TrainingLog) -> None:
    """Held-out accuracy over kinds of video, and sheets of random samples and of failures."""
    begin, count, plan = time.time(), options.evaluate or trainer.plan.check_count, trainer.plan
    settings = (plan.steps, plan.shift, plan.guidance)
    one = world.sample(count, 1, np.random.default_rng(902), held_out=True)
    few = one.take(slice(0, 24))
    size = tuple(side // plan.shrink for side in LANDSCAPE)
    again = to_pixels(trainer, trainer.encoder(few, size, plan.frames).float())
    log.write("report", kind="reconstruction", accuracy=accuracy_of(again, few))
    videos = generate(trainer, one, LANDSCAPE, *settings)
    scores = scores_of(videos, one)
    log.write("report", kind="one", accuracy=mean_scores(scores))
    good = [marks["all_three"] and marks["background"] for marks in scores]
    titles = [("ok  " if ok else "MISS  ") + caption(one.words(i)) for i, ok in enumerate(good)]
    contact_sheet(videos[:12], titles[:12], options.out / "sheet_one.jpg")
    two = world.sample(count // 2, 2, np.random.default_rng(903), held_out=True)
    pairs = generate(trainer, two, LANDSCAPE, *settings)
    log.write("report", kind="two", accuracy=accuracy_of(pairs, two))
    wide = world.sample(count // 2, 1, np.random.default_rng(904), held_out=True, wide=True)
    first = trainer.encoder(wide, size, 1)[:, :, 0].float()
    moved = generate(trainer, wide, LANDSCAPE, *settings, first=first)
    log.write("report", kind="image", accuracy=accuracy_of(moved, wide))
    titles = [
        name + caption(s.words(i)) for s, name in ((two, "two  "), (wide, "image  ")) for i in range(6)[: count // 2]
    ]
    contact_sheet(torch.cat([pairs[:6], moved[:6]]), titles, options.out / "sheet_more.jpg")
    log.write("reported", took=time.time() - begin)


if __name__ == "__main__":
    main()
