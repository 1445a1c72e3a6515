// Gather of the head: y[row, column, o] = bias[o] + sum over the 3x3 taps of taps[row + tap_h - 1, column + tap_w - 1, tap, o],
// zero outside the plane, in fp32; then one rounding, to uint8 frames with the 2x2 patches spread out or to clamped fp32.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "convolution.h"

namespace {

constexpr int kOutputs = 12;  // 3 colours x 2 columns x 2 rows of a patch
constexpr int kTaps = 9;
constexpr int kThreads = 128;

__device__ float2 widen(__half2 v) { return __half22float2(v); }
__device__ float2 widen(__nv_bfloat162 v) { return __bfloat1622float2(v); }

// sums += the twelve values of one tap. A tap's twelve 16-bit values are 24 bytes on an 8-byte boundary.
template <class Pair>
__device__ void add_tap(const void* tap, float (&sums)[kOutputs]) {
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    uint2 words = __ldg(static_cast<const uint2*>(tap) + part);
    float2 low = widen(reinterpret_cast<Pair const&>(words.x)), high = widen(reinterpret_cast<Pair const&>(words.y));
    sums[4 * part] += low.x;
    sums[4 * part + 1] += low.y;
    sums[4 * part + 2] += high.x;
    sums[4 * part + 3] += high.y;
  }
}

// round(255 * clamp(x / 2 + 0.5, 0, 1)), halves to even, as the frames of every path are rounded.
__device__ unsigned char to_byte(float x) {
  return static_cast<unsigned char>(__float2int_rn(fminf(fmaxf(fmaf(x, 0.5f, 0.5f), 0.0f), 1.0f) * 255.0f));
}

// Output o = 4 * colour + 2 * column + row of the patch.
__device__ void write_bytes(Head const& h, int frame, int row, int column, float const (&sums)[kOutputs]) {
  auto frames = static_cast<unsigned char*>(h.frames);
#pragma unroll
  for (int patch_row = 0; patch_row < 2; ++patch_row) {
    int64_t line = (int64_t(frame) * h.rows + row) * 2 + patch_row;
    unsigned char* out = frames + (line * h.width + column) * 6;
#pragma unroll
    for (int i = 0; i < 6; ++i) out[i] = to_byte(sums[4 * (i % 3) + 2 * (i / 3) + patch_row]);
  }
}

__device__ void write_floats(Head const& h, int64_t position, float const (&sums)[kOutputs]) {
  float* out = static_cast<float*>(h.frames) + position * kOutputs;
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) out[o] = fminf(fmaxf(sums[o], -1.0f), 1.0f);
}

template <class Pair>
__global__ void __launch_bounds__(kThreads) gather(Head const h) {
  int column = blockIdx.x * kThreads + threadIdx.x, row = blockIdx.y, frame = blockIdx.z;
  if (column >= h.width) return;
  float sums[kOutputs];
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) sums[o] = __ldg(h.bias + o);
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    int r = row + h.halo_top + tap / 3 - 1, c = column + tap % 3 - 1;
    if (r < 0 || r >= h.rows_in || c < 0 || c >= h.width) continue;
    int64_t position = (int64_t(frame) * h.rows_in + r) * h.width + c;
    add_tap<Pair>(static_cast<const char*>(h.taps) + (position * h.channels + kOutputs * tap) * 2, sums);
  }
  bool finite = true;
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) finite &= isfinite(sums[o]);
  if (!finite) *h.not_finite = 1;
  if (h.as_float) {
    write_floats(h, (int64_t(frame) * h.rows + row) * h.width + column, sums);
  } else {
    write_bytes(h, frame, row, column, sums);
  }
}

}  // namespace

extern "C" int run_head(Head const* h) {
  dim3 grid((h->width + kThreads - 1) / kThreads, h->rows, h->depth);
  auto stream = static_cast<cudaStream_t>(h->stream);
  if (h->bfloat16) {
    gather<__nv_bfloat162><<<grid, kThreads, 0, stream>>>(*h);
  } else {
    gather<__half2><<<grid, kThreads, 0, stream>>>(*h);
  }
  auto error = cudaGetLastError();
  return error == cudaSuccess ? kDone : kCudaError + int(error);
}
