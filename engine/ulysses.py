"""One denoising run on several devices: guidance branches on two halves, tokens shared out within a half.

Sequence parallelism after DeepSpeed-Ulysses (Jacobs et al. 2023): every rank has a run of the video's tokens and of the
text's, and all heads of them; around attention an exchange turns that into all tokens of a run of heads, and back.
Attention does not mind the order of tokens, so the ranks' shares simply follow each other. It is exact up to the order
of sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.attention import Attend, attend
from engine.bands import Link, split
from engine.mmdit import PAN2Transformer3DModel, Prepared


@dataclass(frozen=True)
class Team:
    """Which ranks do what. halves: one tuple of ranks for each guidance branch that runs beside another; with one
    tuple, its ranks do the branches in turn. Ranks beyond them have nothing to do."""

    halves: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """How many take part."""
        return sum(len(half) for half in self.halves)

    def half_of(self, rank: int) -> int:
        """The half that a rank is in."""
        return next(index for index, half in enumerate(self.halves) if rank in half)


def form_team(ranks: int, heads: int, guided: bool, tokens: int) -> Team:
    """The team that uses the most of `ranks` ranks, halves before longer exchanges. A half has a number of ranks that
    divides the heads, and no more than there are video tokens."""
    choices = [
        (branches * size, branches, size)
        for branches in ((2, 1) if guided else (1,))
        for size in range(1, ranks // branches + 1)
        if heads % size == 0 and size <= tokens
    ]
    _, branches, size = max(choices)
    return Team(tuple(tuple(range(half * size, (half + 1) * size)) for half in range(branches)))


class Heads:
    """The exchange around one rank's joint attention. half: ranks in order; tokens, text: of the whole sequence."""

    def __init__(self, half: Sequence[int], rank: int, link: Link, tokens: int, text: int) -> None:
        self.half, self.place, self.link = tuple(half), half.index(rank), link
        self.video, self.text = split(tokens, len(half)), split(text, len(half))

    def attend(self, attention: Attend, text_out: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """attention over all tokens. q, k, v [B, S, H, E] of our tokens, video then text (without text_out, q lacks the
        text); returns [B, S, H * E] of our queries."""
        heads, lengths = split(q.shape[2], len(self.half)), self._lengths(text_out)
        whole = [self._to_heads(x, heads, self._lengths(True)) for x in (k, v)]
        y = attention(self._to_heads(q, heads, lengths), *whole).unflatten(-1, (-1, q.shape[3]))
        return self._to_tokens(y, lengths).flatten(2)

    def _lengths(self, text: bool) -> list[int]:
        """How many rows each rank of the half has, with those of the text or without."""
        counts = [part.stop - part.start for part in self.video]
        return [n + part.stop - part.start for n, part in zip(counts, self.text, strict=True)] if text else counts

    def _to_heads(self, x: Tensor, heads: list[slice], lengths: list[int]) -> Tensor:
        """[B, S of ours, H, E] to [B, S of all, H / n, E]."""
        parts = [x[:, :, part].contiguous() for part in heads]
        places = [x.new_empty(len(x), length, *parts[self.place].shape[2:]) for length in lengths]
        return torch.cat(self._swap(parts, places), dim=1)

    def _to_tokens(self, y: Tensor, lengths: list[int]) -> Tensor:
        """[B, S of all, H / n, E] to [B, S of ours, H, E]."""
        parts = [part.contiguous() for part in y.split(lengths, dim=1)]
        return torch.cat(self._swap(parts, [torch.empty_like(parts[self.place]) for _ in parts]), dim=2)

    def _swap(self, parts: list[Tensor], places: list[Tensor]) -> list[Tensor]:
        """parts[i] goes to rank i of the half; what comes from there is the i-th of the result."""
        others = [(index, rank) for index, rank in enumerate(self.half) if index != self.place]
        outgoing = [(rank, parts[index]) for index, rank in others]
        self.link.swap(outgoing, [(rank, places[index]) for index, rank in others])()
        places[self.place] = parts[self.place]
        return places

    def gather(self, x: Tensor) -> Tensor:
        """[B, N of ours, D] of the video to [B, N, D]."""
        x = x.contiguous()
        sizes = [(len(x), part.stop - part.start, x.shape[2]) for part in self.video]
        return torch.cat(self._swap([x] * len(self.half), [x.new_empty(size) for size in sizes]), dim=1)

    def total(self, sums: Tensor) -> Tensor:
        """The sum over the half of a small vector, the same bits on every rank of it."""
        return torch.stack(self._swap([sums] * len(self.half), [torch.empty_like(sums) for _ in self.half])).sum(dim=0)


@dataclass(frozen=True)
class Branch:
    """One guidance branch: our tokens of it, and the exchange with those who have the others."""

    prepared: Prepared
    heads: Heads


class SpreadModel:
    """A transformer as `engine.denoise` uses it, of which this rank does its share."""

    def __init__(self, model: PAN2Transformer3DModel, team: Team, rank: int, link: Link) -> None:
        self.model, self.rank, self.link = model, rank, link
        self.device = model.device
        self.halves, self.mine = team.halves, team.half_of(rank)
        self.backends = [block.attn.backend for block in model.transformer_blocks]

    def prepare(self, text: Tensor, condition: Tensor, sigmas: Sequence[float]) -> Branch:
        """As of the model, with this rank's tokens cut out."""
        whole = self.model.prepare(text, condition, sigmas)
        heads = Heads(self.halves[self.mine], self.rank, self.link, whole.condition.shape[1], whole.text.shape[1])
        video, words = heads.video[heads.place], heads.text[heads.place]
        ours = dataclasses.replace(
            whole,
            text=whole.text[:, words].contiguous(),
            condition=whole.condition[:, video].contiguous(),
            rope=tuple(table[video] for table in whole.rope),
            tokens=video,
            gather=heads.gather,
        )
        return Branch(ours, heads)

    def velocities(
        self, model: Any, latents: Tensor, k: int, branches: Sequence[Branch], caches: Sequence[Any]
    ) -> list[Tensor]:
        """As of `engine.denoise`: on every rank all, each computed by the half whose branch it is."""
        if len(self.halves) == 1:
            return [self._velocity(latents, k, *one) for one in zip(branches, caches, strict=True)]
        ours = self._velocity(latents, k, branches[self.mine], caches[self.mine]).contiguous()
        return self._from_both(ours, caches)

    def _from_both(self, ours: Tensor, caches: Sequence[Any]) -> list[Tensor]:
        partner = self.halves[1 - self.mine][self.halves[self.mine].index(self.rank)]
        theirs, cache = torch.empty_like(ours), caches[self.mine]
        told = torch.tensor([cache.recalled if cache else 0], device=ours.device)
        heard = torch.empty_like(told)
        self.link.swap([(partner, ours), (partner, told)], [(partner, theirs), (partner, heard)])()
        if cache:
            caches[1 - self.mine].recalled = int(heard)
        return [ours, theirs] if self.mine == 0 else [theirs, ours]

    def _velocity(self, latents: Tensor, k: int, branch: Branch, cache: Any) -> Tensor:
        if cache:
            cache.total = branch.heads.total
        last = self.model.transformer_blocks[-1]
        for block, backend in zip(self.model.transformer_blocks, self.backends, strict=True):
            block.attn.backend = partial(branch.heads.attend, partial(attend, backend=backend), block is not last)
        try:
            return self.model.velocity(latents, k, branch.prepared, cache)
        finally:
            for block, backend in zip(self.model.transformer_blocks, self.backends, strict=True):
                block.attn.backend = backend
