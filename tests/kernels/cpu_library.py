"""What the compiled object promises, in PyTorch: reads the same structures and the same memory, by the words of
csrc/convolution.h. With it the tests see on a CPU whether the right numbers would reach a kernel."""

import ctypes

import torch
import torch.nn.functional as F


class CpuLibrary:
    """Stands in for `built.Library`. `calls` remembers (tile name, structure); a result is written where the structure
    says; `fails` is raised instead where it is set."""

    def __init__(self, names, workspace_bytes=0):
        self.tiles = {name: i for i, name in enumerate(names)}
        self.names, self.workspace_bytes = list(names), workspace_bytes
        self.calls, self.fails = [], None

    def workspace(self, tile, call):
        return self.workspace_bytes

    def convolve(self, tile, call):
        if self.fails:
            raise self.fails
        self.calls.append((self.names[tile], call))
        dtype = torch.bfloat16 if self.names[tile].endswith("bf16") else torch.float16
        frames = call.depth - call.taps_t + 1
        rows = call.height + call.pad_top + call.pad_bottom - call.taps_h + 1
        columns = call.width + call.pad_left + call.pad_right - call.taps_w + 1
        steps = {"y": call.y_step, "residual": call.residual_step}

        def output(name, p):
            start, size = getattr(call, name), dtype.itemsize
            if call.frames_apart:
                return view(start, dtype, (frames, rows, columns, call.filters), steps[name])
            return view(start + p * steps[name] * size, dtype, (frames, rows, columns, call.filters))

        for p in range(call.phases):
            x_start = call.x + p * call.depth * call.x_step * dtype.itemsize
            x = view(x_start, dtype, (call.depth, call.height, call.width, call.channels), call.x_step)
            shape = (call.filters, call.taps_t, call.taps_h, call.taps_w, call.channels)
            weight = view(call.weight + p * torch.Size(shape).numel() * dtype.itemsize, dtype, shape)
            pads = (call.pad_left, call.pad_right, call.pad_top, call.pad_bottom)
            y = F.conv3d(F.pad(x.float().permute(3, 0, 1, 2), pads)[None], weight.float().permute(0, 4, 1, 2, 3))
            y = y[0].permute(1, 2, 3, 0)
            if call.bias:
                y = y + view(call.bias, torch.float32, (call.filters,))
            if call.residual:
                y = y + output("residual", p).float()
            output("y", p).copy_(y)


def view(address, dtype, shape, step=None):
    """Memory as a tensor; step: elements between the items of the first dimension, packed without it."""
    length = torch.Size(shape).numel() if step is None else (shape[0] - 1) * step + torch.Size(shape[1:]).numel()
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=dtype)
    if step is None:
        return flat.view(shape)
    inner = [torch.Size(shape[k + 1 :]).numel() for k in range(1, len(shape))]
    return flat.as_strided(shape, (step, *inner))
