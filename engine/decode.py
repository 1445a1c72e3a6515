"""Latents to frames: an iterator of chunks on the host, the same for every path.

Paths: "built" and "portable" (ours with fewer multiplications), "plain" (our streaming decoder, any device) and
"reference" (the decoder of diffusers in strict fp32, the truth that the others are measured against). `explain` says
which one runs and why. Where memory is short or fp16 overflows, the fast ones begin again in smaller pieces or in a
wider type, without a word lost: what was delivered stays, and the next chunk carries a note.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from engine.bands import Rows
from engine.condition import denormalise
from engine.decode_paths import DTYPES, FAST, explain, fast_decoder, forget, instead, leaner, start
from engine.decode_plan import PASSES, FrameChunk, Plan
from engine.errors import NotFiniteError, RequestError, ResourceError
from engine.settings import DecodeSettings
from engine.vae_stream import DecoderState, StreamDecoder, check_supported

RING = 3
Cancel = threading.Event | Callable[[], bool] | None


def decode(
    vae: nn.Module,
    latents: Tensor,
    settings: DecodeSettings | None = None,
    cancel: Cancel = None,
    passes: Sequence[int] = PASSES,
) -> Iterator[FrameChunk]:
    """Decode one video, chunk by chunk: 1 frame, then 16 a chunk (4 latent frames a pass).

    vae: a diffusers AutoencoderKLWan, whose device is the one that computes; latents: fp32 [1, 48, F, h, w],
    normalised, any device; passes: latent frames of each pass, the last number repeats. cancel is read before each
    pass: what was decoded is delivered, then Cancelled is raised. Frames are round(255 * clamp(x / 2 + 0.5, 0, 1)).
    Raises RequestError for wrong input before anything runs, EngineError where values are not finite.

    On CUDA the next pass is started before a chunk is handed out, and frames go to pinned memory on their own stream.
    """
    return _deliver(_begin(vae, _plan(vae, latents, settings, passes)), stopper(cancel))


def float_frames(
    vae: nn.Module,
    latents: Tensor,
    settings: DecodeSettings | None = None,
    cancel: Cancel = None,
    passes: Sequence[int] = PASSES,
) -> Iterator[Tensor]:
    """As `decode`, for measuring: fp32 [t, 3, H, W] in [-1, 1] before rounding, on the VAE's device, yours to keep."""
    return _measure(_begin(vae, _plan(vae, latents, settings, passes)), stopper(cancel))


def stopper(cancel: Cancel) -> Callable[[], bool]:
    """Cancel in any of its forms as a question."""
    if cancel is None:
        return lambda: False
    return cancel.is_set if isinstance(cancel, threading.Event) else cancel


def _plan(vae: nn.Module, latents: Tensor, settings: DecodeSettings | None, passes: Sequence[int]) -> Plan:
    check_supported(vae)
    settings = settings or DecodeSettings()
    choice = explain(settings, vae.post_quant_conv.weight.device, vae)
    return Plan(latents, choice, passes, vae.config["z_dim"], settings.memory_gib, settings.precision != "auto")


class DecodeRun:
    """A plan at work on one device: the rows that it has of each frame, and the state that passes hand on.

    smaller: how many of the ways to cut the work that a fast path has to pass over, because they took too much.
    """

    def __init__(self, vae: nn.Module, plan: Plan, rows: Rows | None = None, smaller: int = 0) -> None:
        self.vae, self.plan, self.rows, self.config = vae, plan, rows or Rows(), vae.config
        self.fast = self.state = None
        self.device = vae.post_quant_conv.weight.device
        self.dtype = DTYPES[plan.choice.precision]
        if plan.choice.path not in FAST:
            forget(vae)
        if plan.choice.path == "plain":
            with torch.no_grad():
                decoder, state = StreamDecoder(vae, self.dtype), DecoderState(self.rows)
            self.path = lambda z: decoder.run(z, state)
        elif plan.choice.path in FAST:
            self.fast = fast = fast_decoder(vae, plan.choice)
            height, width = plan.latents[0, 0, 0, self.rows.mine].shape
            self.state = state = start(fast, height, width, plan.memory_gib, self.rows, smaller)
            # Without self in it: a run that refers to itself keeps its gigabytes until Python looks for cycles.
            self.path = lambda z: fast.run(z, state)
        else:
            self.path = _reference(vae)

    def pieces(self, span: slice) -> Iterator[Tensor]:
        """Our rows of the frames of one pass as pieces [t, h, w, 12]. Take them inside `_computing`."""
        return self.path(self._latents(span))

    def _latents(self, span: slice) -> Tensor:
        latents = self.plan.latents[:, :, span, self.rows.mine].to(self.device)
        return denormalise(latents, self.config)[0].to(self.dtype)

    def frames(self, span: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """The same as uint8 [t, H, W, 3], each piece with int32 [1] on the device: 0 if anything of the pass so far was
        not finite."""
        if self.fast is not None:
            yield from self.fast.frames(self._latents(span), self.state)
            return
        finite = torch.ones(1, dtype=torch.int32, device=self.device)
        for piece in self.pieces(span):
            finite = finite * _finite(piece)
            yield _to_bytes(piece), finite

    def floats(self, span: slice) -> tuple[Tensor, bool]:
        """Our rows of one pass before rounding, fp32 [t, 3, H, W] in [-1, 1], and whether all were finite."""
        with _computing(self.plan.choice.precision):
            pieces = list(self.pieces(span))
            finite = all(bool(_finite(piece)) for piece in pieces)
            return torch.cat([_planes(piece) for piece in pieces]), finite


def _begin(vae: nn.Module, plan: Plan, rows: Rows | None = None, smaller: int = 0) -> DecodeRun:
    """A run; where nothing fits, in the precision that takes less memory, as `leaner` says."""
    try:
        return DecodeRun(vae, plan, rows, smaller)
    except (ResourceError, torch.OutOfMemoryError) as error:
        # Without its frames, which hold the weights that did not fit.
        failure = error.with_traceback(None)
    return leaner(plan, failure, lambda other: DecodeRun(vae, other, rows))


def _reference(vae: nn.Module) -> Callable[[Tensor], Iterator[Tensor]]:
    """The decoder of diffusers, one latent frame a call as its own `_decode` does, with a feature cache of ours."""
    dtype = vae.post_quant_conv.weight.dtype
    if dtype != torch.float32:
        raise RequestError(f"The reference needs the VAE's weights in fp32, these are {dtype}; load the VAE in fp32.")
    cache: list[Tensor | str | None] = [None] * sum("CausalConv3d" in type(m).__name__ for m in vae.decoder.modules())

    def run(z: Tensor) -> Iterator[Tensor]:
        x = vae.post_quant_conv(z.unsqueeze(0))
        for frame in x.split(1, dim=2):
            first = cache[0] is None
            y = vae.decoder(frame, feat_cache=cache, feat_idx=[0], first_chunk=first)
            yield y[0].permute(1, 2, 3, 0)

    return run


@contextmanager
def _computing(precision: str) -> Iterator[None]:
    """No autograd, and fp32 products in true fp32 (no bf16 inside, TF32 in convolutions only where it was asked for) on
    every backend; put back afterwards."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.set_float32_matmul_precision(matmul)


def _finite(piece: Tensor) -> Tensor:
    """A boolean on the piece's device; one pass, no temporary of its size."""
    low, high = torch.aminmax(piece)
    return torch.isfinite(low) & torch.isfinite(high)


def _to_bytes(piece: Tensor) -> Tensor:
    """uint8 [t, 2h, 2w, 3] = round(255 * clamp(x / 2 + 0.5, 0, 1)), contiguous."""
    values = piece.float().div(2).add_(0.5).clamp_(0, 1).mul_(255).round_().to(torch.uint8)
    t, h, w, _ = values.shape
    return values.unflatten(-1, (3, 2, 2)).permute(0, 1, 5, 2, 4, 3).reshape(t, 2 * h, 2 * w, 3)


def _measure(run: DecodeRun, stop: Callable[[], bool]) -> Iterator[Tensor]:
    for span in run.plan.passes:
        if stop():
            raise run.plan.cancelled(span)
        frames, finite = run.floats(span)
        if not finite:
            raise run.plan.not_finite(span)
        yield frames
        del frames


def _planes(piece: Tensor) -> Tensor:
    """fp32 [t, 3, 2h, 2w] in [-1, 1]."""
    t, h, w, _ = piece.shape
    spread = piece.float().clamp(-1, 1).unflatten(-1, (3, 2, 2)).permute(0, 3, 1, 5, 2, 4)
    return spread.reshape(t, 3, 2 * h, 2 * w)


class Ring(Protocol):
    """Host buffers in turn, `RING` of them, so that two chunks stay readable while the next one is written."""

    def next(self) -> Tensor:
        """The buffer uint8 [longest chunk, H, W, 3] whose chunk was asked for longest ago."""
        ...


class _HostRing:
    """A ring of this process, pinned for CUDA."""

    def __init__(self, plan: Plan, pinned: bool) -> None:
        self.shape, self.pinned = (plan.longest, plan.height, plan.width, 3), pinned
        self.buffers: list[Tensor] = []
        self.turn = 0

    def next(self) -> Tensor:
        if len(self.buffers) < RING:
            self.buffers.append(torch.empty(self.shape, dtype=torch.uint8, pin_memory=self.pinned))
        buffer = self.buffers[self.turn]
        self.turn = (self.turn + 1) % RING
        return buffer


class HostCopy:
    """Where a pass leaves its frames: straight into the ring on a CPU, over a stream of its own on CUDA."""

    # Passes that are started before the oldest chunk is handed out: none where a pass is done when it returns.
    AHEAD: ClassVar[dict[str, int]] = {"cuda": 1}

    def __init__(self, run: DecodeRun, ring: Ring | None = None) -> None:
        self.run, self.cuda = run, run.device.type == "cuda"
        self.ahead = self.AHEAD.get(run.device.type, 0)
        self.ring = ring or _HostRing(run.plan, self.cuda)
        self.stream = torch.cuda.Stream(run.device) if self.cuda else None

    def start(self, span: slice) -> Pending:
        """Run a pass. On CUDA this only queues the work; on a CPU the frames are there when it returns."""
        pending = Pending(self, span)
        while pending.advance():
            pass
        return pending

    def skip(self, span: slice) -> None:
        """Run a pass whose frames were delivered before, for the state that it leaves."""
        with _computing(self.run.plan.choice.precision):
            for _ in self.run.frames(span):
                pass

    def copy(self, source: Tensor, target: Tensor) -> None:
        """To the host, when what is queued so far has made it."""
        if self.stream is None:
            target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.run.device))
        with torch.cuda.stream(self.stream):
            # A band's rows lie together in each frame only, and a copy that gathers would wait for the device.
            pairs = [(source, target)] if target.is_contiguous() else zip(source, target, strict=True)
            for part, place in pairs:
                place.copy_(part, non_blocking=True)
        source.record_stream(self.stream)


class Pending:
    """A pass on its way. span: its latent frames."""

    def __init__(self, copy: HostCopy, span: slice) -> None:
        self.copy, self.span = copy, span
        self.buffer, self.done, self.event = copy.ring.next(), 0, None
        self.flag = torch.empty(1, dtype=torch.int32, pin_memory=copy.cuda)
        self._pieces, self._finite = copy.run.frames(span), None

    def advance(self) -> bool:
        """Queue the next piece of the pass; False once all of it is queued."""
        with _computing(self.copy.run.plan.choice.precision):
            frames, finite = next(self._pieces, (None, None))
            if frames is not None:
                ours = self.buffer[:, self.copy.run.rows.pixels]
                self.copy.copy(frames, ours[self.done : self.done + len(frames)])
                self._finite = finite
                self.done += len(frames)
                return True
            # Over the copying stream as well: asking the device for it would wait for the pass that is queued next.
            self.copy.copy(self._finite, self.flag)
        self.event = self.copy.stream.record_event() if self.copy.cuda else None
        return False

    def ready(self) -> bool:
        """Whether the frames are on the host already."""
        return self.event is None or self.event.query()

    def wait(self) -> bool:
        """Wait until the frames are on the host; whether all values were finite."""
        if self.event is not None:
            self.event.synchronize()
        return bool(self.flag)

    def chunk(self) -> FrameChunk:
        """The frames, once they are on the host; EngineError where they are not finite."""
        plan = self.copy.run.plan
        if not self.wait():
            raise plan.not_finite(self.span)
        return plan.deliver(self.span, self.buffer[: self.done].numpy())


def _deliver(run: DecodeRun, stop: Callable[[], bool]) -> Iterator[FrameChunk]:
    done = 0
    while True:
        try:
            for chunk in _attempt(HostCopy(run), stop, done):
                done += 1
                yield chunk
            return
        except (NotFiniteError, torch.OutOfMemoryError) as error:
            # Without its frames, which hold the tensors of the attempt.
            failure = error.with_traceback(None)
        vae, plan, rows, state = run.vae, run.plan, run.rows, run.state
        del run
        plan, smaller = instead(plan, state, failure)
        del state
        run = _begin(vae, plan, rows, smaller)


def _attempt(copy: HostCopy, stop: Callable[[], bool], done: int) -> Iterator[FrameChunk]:
    """The chunks after the first `done`."""
    plan, started = copy.run.plan, deque[Pending]()
    for index, span in enumerate(plan.passes):
        if stop():
            yield from (pending.chunk() for pending in started)
            raise plan.cancelled(span)
        if index < done:
            copy.skip(span)
            continue
        pending = Pending(copy, span)
        while pending.advance():
            # A GPU takes about a thousand kernels ahead, less than a pass has: without this, frames that are there
            # would wait until the next pass is nearly done as well.
            while started and started[0].ready():
                yield started.popleft().chunk()
        started.append(pending)
        while len(started) > copy.ahead:
            yield started.popleft().chunk()
    yield from (pending.chunk() for pending in started)
