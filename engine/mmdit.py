"""PAN2's video diffusion transformer: two streams, video and text, joint attention, a velocity out.

`forward` is the plain definition. A denoising loop calls `prepare` once and `velocity` every step: the refined text,
the RoPE tables, all modulations and the condition's share of the patch embedding don't change from step to step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.fused import run_blocks
from engine.layers import (
    REFINER_EPS,
    AdaNorm,
    RefinerBlock,
    RMSNorm,
    Rope,
    TimeEmbedder,
    TransformerBlock,
    modulate,
)
from engine.packed import reserve
from engine.rope import rope_tables
from engine.step_cache import StepCache

Enough = Callable[[Tensor, Tensor], bool]
SCHEDULES_KEPT = 2  # at full size 50 steps take 210 MiB


@dataclass(frozen=True)
class MMDiTConfig:
    """Arguments of the model, under the names of the released transformer/config.json. Defaults: the 29B release."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    in_channels: int = 97
    out_channels: int = 48
    num_attention_heads: int = 32
    attention_head_dim: int = 128
    num_layers: int = 44
    num_refiner_layers: int = 4
    mlp_ratio: float = 8.0
    context_mlp_ratio: float = 4.0
    refiner_mlp_ratio: float = 4.0
    text_embed_dim: int = 4096
    rope_axes_dim: tuple[int, int, int] = (16, 56, 56)
    rope_theta: float = 256.0
    rope_temporal_scale: float = 16 / 24

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def read(cls, values: dict[str, Any]) -> "MMDiTConfig":
        """From the content of a config.json; its private keys (`_class_name`, ...) are ignored.

        Raises ValueError, naming value, rule and fix, for unknown keys and for what can't be built.
        """
        known = [f.name for f in fields(cls)]
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if not k.startswith("_")}
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"unknown transformer setting {', '.join(unknown)}; the settings are {', '.join(known)}")
        config = cls(**values)
        if problems := list(_problems(config)):
            raise ValueError("impossible transformer configuration: " + "; ".join(problems))
        return config


def _problems(c: MMDiTConfig) -> Iterator[str]:
    """What can't be built, in words. Sizes are looked at first: the other rules calculate with them."""
    malformed = [text for f in fields(c) if (text := _malformed(f.name, getattr(c, f.name), f.default))]
    yield from malformed or _contradictions(c)


def _malformed(name: str, value: Any, example: Any) -> str | None:
    kind = float if isinstance(example, float) else int
    count = len(example) if isinstance(example, tuple) else 1
    numbers = value if isinstance(value, tuple) else (value,)
    whole = all(type(n) is int or type(n) is kind for n in numbers)
    if whole and isinstance(value, tuple) == isinstance(example, tuple) and len(numbers) == count:
        return None if all(0 < n < float("inf") for n in numbers) else f"{name} is {value}, it must be positive"
    return f"{name} is {value!r}, it must be {f'{count} values of type ' if count > 1 else ''}{kind.__name__}"


def _contradictions(c: MMDiTConfig) -> Iterator[str]:
    if c.patch_size != (1, 2, 2):
        yield f"patch_size is {c.patch_size}, only (1, 2, 2) is supported"
    if c.in_channels != 2 * c.out_channels + 1:
        yield (
            f"in_channels is {c.in_channels}, it must be 2 * out_channels + 1 = {2 * c.out_channels + 1} "
            f"(latents, condition, mask)"
        )
    if sum(c.rope_axes_dim) != c.attention_head_dim:
        yield (
            f"rope_axes_dim is {c.rope_axes_dim}, which adds up to {sum(c.rope_axes_dim)}; it must add up to "
            f"attention_head_dim = {c.attention_head_dim}"
        )
    if any(width % 2 for width in c.rope_axes_dim):
        yield f"rope_axes_dim is {c.rope_axes_dim}, every width must be even: RoPE turns pairs"
    for name in ("mlp_ratio", "context_mlp_ratio", "refiner_mlp_ratio"):
        if int(c.dim * getattr(c, name)) < 1:
            yield f"{name} is {getattr(c, name)}, with a width of {c.dim} it leaves no inner width"


@dataclass(frozen=True)
class Prepared:
    """What `velocity` needs besides the latents; made by `prepare` for one text, one condition and one schedule."""

    text: Tensor  # refined, [B, L, D]
    condition: Tensor  # the condition's share of the patch embedding with its bias, [B, N, D]
    rope: Rope
    blocks: list[Tensor]  # for every block float32 [steps, 6 D]
    out: Tensor  # float32 [steps, 2 D]
    latent_shape: tuple[int, ...]  # [B, C, F, H, W]
    sigmas: tuple[float, ...]
    # On several devices: which of the video's tokens are here, and what brings the output of all together.
    tokens: slice = field(default_factory=lambda: slice(None))
    gather: Callable[[Tensor], Tensor] = torch.Tensor.contiguous


class PAN2Transformer3DModel(nn.Module):
    """The published architecture with the published parameter names.

    Runs in the dtype of its weights (or under autocast); the residual streams have the dtype of `x_embedder.weight`.
    Modulations are float32: `norm1.linear` may stay in float32 and on the host while the rest is bf16 on a GPU.
    A new model starts as the identity (zero gates, zero output), as is usual for such models.
    """

    def __init__(self, **config):
        super().__init__()
        self.config = c = MMDiTConfig.read(config)
        dim, heads = c.dim, c.num_attention_heads
        self.x_embedder = nn.Conv3d(c.in_channels, dim, c.patch_size, stride=c.patch_size)
        self.time_embedder = TimeEmbedder(dim)
        self.context_embedder = nn.Sequential(RMSNorm(c.text_embed_dim, REFINER_EPS), nn.Linear(c.text_embed_dim, dim))
        refiner_inner, inner, context_inner = (
            int(dim * ratio) for ratio in (c.refiner_mlp_ratio, c.mlp_ratio, c.context_mlp_ratio)
        )
        self.context_refiner = nn.ModuleList(
            RefinerBlock(dim, heads, refiner_inner) for _ in range(c.num_refiner_layers)
        )
        self.context_type_embedding = nn.Parameter(torch.zeros(dim))
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(dim, heads, inner, context_inner) for _ in range(c.num_layers)
        )
        self.norm_out = AdaNorm(dim, 2)
        self.proj_out = nn.Linear(dim, c.out_channels * 4)
        self.fused_kernels = False
        self._schedules: OrderedDict[tuple, tuple[list[Tensor], Tensor]] = OrderedDict()
        self.register_load_state_dict_post_hook(_forget_schedules)
        self.init_weights()

    @property
    def dtype(self) -> torch.dtype:
        return self.x_embedder.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.x_embedder.weight.device

    def cast(self, dtype: torch.dtype) -> "PAN2Transformer3DModel":
        """As `to(dtype)`, but `norm1.linear` becomes or stays float32, as in the release."""
        for name, parameter in self.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if ".norm1.linear." in name else dtype)
        for block in self.transformer_blocks:
            block.attn.pack()
        return self

    def reserve(self, place: Callable[[str], tuple[torch.device, torch.dtype]]) -> None:
        """For a loader, on meta: memory for the weights that share one tensor, by the name of a parameter."""
        for i, block in enumerate(self.transformer_blocks):
            for layers, first in zip(block.attn.streams(), ("to_q", "add_q_proj"), strict=True):
                reserve(layers, *place(f"transformer_blocks.{i}.attn.{first}.weight"))

    def set_fused_kernels(self, on: bool) -> None:
        """Compute the blocks in few passes (`engine.fused`), with Triton kernels where those run. No gradients."""
        self.fused_kernels = on

    def set_attention(self, backend: str | None) -> None:
        """Which implementation the blocks' attention takes, see `engine.attention`; None: PyTorch's own choice."""
        for block in self.transformer_blocks:
            block.attn.backend = backend

    def init_weights(self) -> None:
        """Xavier for linears, zero biases, norms one; zero for modulations and output.

        So gates are zero and every block begins as the identity, the usual start of a diffusion transformer; the time
        embedding and the text's type embedding get a deviation of 0.02. On meta nothing is drawn.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.weight.flatten(1))
        nn.init.zeros_(self.x_embedder.bias)
        nn.init.normal_(self.context_type_embedding, std=0.02)
        for layer in (self.time_embedder.linear_1, self.time_embedder.linear_2):
            nn.init.normal_(layer.weight, std=0.02)
        for layer in (*(b.norm1.linear for b in self.transformer_blocks), self.norm_out.linear, self.proj_out):
            nn.init.zeros_(layer.weight)

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        """Velocity [B, C_out, F, H, W] in the model's dtype.

        hidden_states [B, 2 C_out + 1, F, H, W]: noisy latents, condition latents, mask; timestep [B] in 0..1000;
        encoder_hidden_states [B, L, text width]. Raises ValueError for shapes that don't fit.
        """
        self._check(hidden_states, self.config.in_channels, "hidden_states")
        self._check_text(encoder_hidden_states, len(hidden_states))
        if timestep.shape != hidden_states.shape[:1]:
            raise ValueError(
                f"timestep has shape {list(timestep.shape)}, one value for each of the {len(hidden_states)} samples "
                f"is needed"
            )
        temb = self.time_embedder(timestep)
        x = F.linear(patchify(hidden_states.to(self.dtype)), self.x_embedder.weight.flatten(1), self.x_embedder.bias)
        c = self.refine(encoder_hidden_states)
        rope = self.rope(hidden_states.shape)
        modulations = [b.norm1(temb) for b in self.transformer_blocks]
        return self.run(x.to(self.dtype), c, modulations, self.norm_out(temb), rope, hidden_states.shape)

    def refine(self, text: Tensor) -> Tensor:
        """Text embedding [B, L, text width] to the text stream [B, L, D]; depends on nothing else."""
        c = self.context_embedder(text.to(self.dtype)).to(self.dtype)
        for block in self.context_refiner:
            c = block(c)
        return c + self.context_type_embedding

    def rope(self, shape: Sequence[int]) -> Rope:
        """RoPE tables for latents of shape [B, C, F, H, W]."""
        c, (frames, height, width) = self.config, shape[2:]
        grid = (frames, height // 2, width // 2)
        return rope_tables(grid, c.rope_axes_dim, c.rope_theta, c.rope_temporal_scale, self.device)

    def run(
        self,
        x: Tensor,
        c: Tensor,
        modulations: list[Tensor],
        out: Tensor,
        rope: Rope,
        shape: Sequence[int],
        enough: Enough | None = None,
        gather: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    ) -> Tensor | None:
        """Tokens [B, N, D] and text [B, L, D] to a velocity for latents of `shape`. out: the modulation behind the
        blocks; unlike in the blocks its scale comes first.

        enough: asked with the video stream before and after the first block; if it says so, the result is None.
        """
        scale, shift = out.chunk(2, dim=-1)
        if self.fused_kernels:
            self._refuse_gradients()
            x = run_blocks(self.transformer_blocks, x, c, modulations, (shift, scale), rope, enough)
        else:
            x = self.blocks(x, c, modulations, rope, enough)
            x = None if x is None else modulate(x, shift, scale)
        return None if x is None else unpatchify(gather(self.proj_out(x)), shape).to(self.dtype)

    def blocks(
        self, x: Tensor, c: Tensor, modulations: list[Tensor], rope: Rope, enough: Enough | None = None
    ) -> Tensor | None:
        """Both streams through all blocks; the text's own result of the last one would go nowhere."""
        last = len(modulations) - 1
        for i, (block, modulation) in enumerate(zip(self.transformer_blocks, modulations, strict=True)):
            before = x
            with block.visit():
                x, c = block(x, c, modulation, rope, text_out=i < last)
            if i == 0 and enough is not None and enough(before, x):
                return None
        return x

    def _refuse_gradients(self) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise RuntimeError(
                "the fused kernels have no gradients; call set_fused_kernels(False), or work under torch.no_grad()"
            )

    @torch.no_grad()
    def prepare(self, text_embeddings: Tensor, condition: Tensor, sigmas: Sequence[float]) -> Prepared:
        """All that stays the same over a denoising run.

        text_embeddings [B, L, text width]; condition [B, C_out + 1, F, H, W], latents then mask; sigmas in 0..1.
        The modulations are kept by schedule: the second guidance branch and the next request find them.
        """
        self._check(condition, self.config.out_channels + 1, "condition")
        self._check_text(text_embeddings, len(condition))
        weight = self.x_embedder.weight[:, self.config.out_channels :].flatten(1)
        share = F.linear(patchify(condition.to(self.device, self.dtype)), weight, self.x_embedder.bias)
        blocks, out = self.modulations(sigmas)
        return Prepared(
            text=self.refine(text_embeddings.to(self.device)),
            condition=share.to(self.dtype),
            rope=self.rope(condition.shape),
            blocks=blocks,
            out=out,
            latent_shape=(len(condition), self.config.out_channels, *condition.shape[2:]),
            sigmas=tuple(sigmas),
        )

    @torch.no_grad()
    def velocity(self, latents: Tensor, k: int, prepared: Prepared, cache: StepCache | None = None) -> Tensor:
        """Velocity [B, C_out, F, H, W] at sigmas[k]: forward of (latents, condition) at t = 1000 * sigmas[k].

        cache: of this run and guidance branch; a step that it recalls costs one block.
        """
        if tuple(latents.shape) != prepared.latent_shape:
            raise ValueError(
                f"latents have shape {list(latents.shape)}, this was prepared for {list(prepared.latent_shape)}"
            )
        if not 0 <= k < len(prepared.sigmas):
            raise ValueError(f"step {k} is not in the prepared schedule of {len(prepared.sigmas)} sigmas")
        weight = self.x_embedder.weight[:, : self.config.out_channels].flatten(1)
        patches = patchify(latents.to(self.device, self.dtype))[:, prepared.tokens]
        x = torch.addmm(prepared.condition.flatten(0, 1), patches.flatten(0, 1), weight.T).view_as(prepared.condition)
        modulations, enough = [m[k] for m in prepared.blocks], partial(cache.recalls, k) if cache else None
        x, out = x.to(self.dtype), prepared.out[k]
        velocity = self.run(x, prepared.text, modulations, out, prepared.rope, latents.shape, enough, prepared.gather)
        if velocity is None:
            return cache.velocity(k)
        if cache:
            cache.keep(k, velocity)
        return velocity

    @torch.no_grad()
    def modulations(self, sigmas: Sequence[float]) -> tuple[list[Tensor], Tensor]:
        """For every sigma the six modulations of each block [steps, 6 D] and the output's [steps, 2 D], float32.

        `norm1.linear` passes over the compute device one block at a time.
        """
        if not sigmas or not all(0 <= sigma <= 1 for sigma in sigmas):
            raise ValueError(f"sigmas are {list(sigmas)}; at least one is needed, each in 0..1 (timestep / 1000)")
        key = (tuple(sigmas), self.device, self.dtype, self._modulation_weights())
        if key not in self._schedules:
            # float32 as in `forward`, where t is a float32 tensor: a rounding of t is visible in its sinusoids
            t = 1000 * torch.tensor(sigmas, dtype=torch.float32, device=self.device)
            temb = self.time_embedder(t)
            self._schedules[key] = [b.norm1(temb) for b in self.transformer_blocks], self.norm_out(temb)
        self._schedules.move_to_end(key)
        while len(self._schedules) > SCHEDULES_KEPT:
            self._schedules.popitem(last=False)
        return self._schedules[key]

    def _modulation_weights(self) -> tuple[tuple[int, int], ...]:
        """Where the weights behind the modulations lie and how often each was changed in place.

        Training, moving or replacing weights gives another value, so nothing stale is found.
        """
        modules = (self.time_embedder, self.norm_out, *(b.norm1 for b in self.transformer_blocks))
        weights = (p for module in modules for p in module.parameters())
        return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in weights)

    def forget_schedules(self) -> None:
        """Drop all kept modulations: to free their memory, or after a write through `.data`, which leaves no trace."""
        self._schedules.clear()

    def _check(self, x: Tensor, channels: int, name: str) -> None:
        if x.dim() != 5 or x.shape[1] != channels:
            raise ValueError(f"{name} has shape {list(x.shape)}, [batch, {channels}, frames, height, width] is needed")
        if x.shape[3] % 2 or x.shape[4] % 2 or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}: height {x.shape[3]} and width {x.shape[4]} must be even "
                f"(patches are 2 x 2) and nothing may be empty"
            )

    def _check_text(self, text: Tensor, batch: int) -> None:
        width = self.config.text_embed_dim
        if text.dim() != 3 or text.shape[0] != batch or text.shape[1] < 1 or text.shape[2] != width:
            raise ValueError(
                f"the text embedding has shape {list(text.shape)}, [{batch}, tokens, {width}] is needed: "
                f"the same batch as the latents, at least one token, text_embed_dim = {width}"
            )


def _forget_schedules(model: PAN2Transformer3DModel, _: Any) -> None:
    model.forget_schedules()


def patchify(x: Tensor) -> Tensor:
    """[B, C, F, H, W] to patches [B, F * H/2 * W/2, C * 4], values ordered channel, row, column."""
    b, c, f, h, w = x.shape
    x = x.view(b, c, f, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
    return x.reshape(b, f * (h // 2) * (w // 2), c * 4)


def unpatchify(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The reverse, for latents of `shape`[2:] = F, H, W: [B, N, C * 4] to [B, C, F, H, W]."""
    b, (f, h, w) = len(x), shape[2:]
    x = x.view(b, f, h // 2, w // 2, -1, 2, 2).permute(0, 4, 1, 2, 5, 3, 6)
    return x.reshape(b, -1, f, h, w)
