// v[row, column, o] = sum over 3x3 taps of values[row + tap_row - 1, column + tap_column - 1, tap, o], zero left and right
// of the frame, + bias[o], in fp32 and in this order; written as it is, or rounded once to uint8 with the 2x2 patches
// spread out.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "convolution.h"

namespace {

constexpr int kOutputs = 12;  // three colours of two columns of two rows
constexpr int kTaps = 9;
constexpr int kThreads = 128;

__device__ float2 widen(__half2 v) { return __half22float2(v); }
__device__ float2 widen(__nv_bfloat162 v) { return __bfloat1622float2(v); }

// sums += the twelve values of one tap: 24 bytes on an 8-byte boundary.
template <class Pair>
__device__ void add_tap(const char* tap, float (&sums)[kOutputs]) {
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    uint2 words = __ldg(reinterpret_cast<const uint2*>(tap) + part);
    float2 low = widen(reinterpret_cast<Pair const&>(words.x)), high = widen(reinterpret_cast<Pair const&>(words.y));
    sums[4 * part] += low.x;
    sums[4 * part + 1] += low.y;
    sums[4 * part + 2] += high.x;
    sums[4 * part + 3] += high.y;
  }
}

// round(255 * clamp(v / 2 + 0.5, 0, 1)), halves to even, as every path rounds its frames. NaN becomes 0.
__device__ unsigned char to_byte(float v) {
  return static_cast<unsigned char>(__float2int_rn(fminf(fmaxf(v * 0.5f + 0.5f, 0.0f), 1.0f) * 255.0f));
}

// Output o = 4 * colour + 2 * column + row of its two by two pixels.
__device__ void write_pixels(unsigned char* frame, int row, int column, int width, float const (&v)[kOutputs]) {
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    unsigned char* out = frame + (int64_t(2 * row + below) * width + column) * 6;
#pragma unroll
    for (int i = 0; i < 6; ++i) out[i] = to_byte(v[4 * (i % 3) + 2 * (i / 3) + below]);
  }
}

template <class Pair>
__global__ void __launch_bounds__(kThreads) gather(Stencil const s) {
  int column = blockIdx.x * kThreads + threadIdx.x, row = blockIdx.y, frame = blockIdx.z;
  if (column >= s.width) return;
  auto values = static_cast<const char*>(s.values) + frame * s.values_step * 2;
  float v[kOutputs] = {};
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    int there = column + tap % 3 - 1;
    if (there < 0 || there >= s.width) continue;
    int64_t position = int64_t(row + tap / 3) * s.width + there;
    add_tap<Pair>(values + (position * s.channels + kOutputs * tap) * 2, v);
  }
  bool finite = true;
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    v[o] += __ldg(s.bias + o);
    finite &= isfinite(v[o]);
  }
  if (!finite) *s.finite = 0;
  if (s.as_float) {
    float* out = static_cast<float*>(s.out) + frame * s.out_step + (int64_t(row) * s.width + column) * kOutputs;
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) out[o] = v[o];
  } else {
    write_pixels(static_cast<unsigned char*>(s.out) + frame * s.out_step, row, column, s.width, v);
  }
}

}  // namespace

extern "C" int run_stencil(Stencil const* s) {
  constexpr int kMost = 65535;  // blocks along y and z
  bool fits = s->depth > 0 && s->depth <= kMost && s->rows > 0 && s->rows <= kMost && s->width > 0 &&
              s->channels >= kTaps * kOutputs && s->channels % 4 == 0 && s->values_step % 4 == 0 &&
              reinterpret_cast<uintptr_t>(s->values) % 8 == 0;
  if (!fits) return kWrongArguments;
  dim3 grid((s->width + kThreads - 1) / kThreads, s->rows, s->depth);
  auto stream = static_cast<cudaStream_t>(s->stream);
  if (s->bfloat16) {
    gather<__nv_bfloat162><<<grid, kThreads, 0, stream>>>(*s);
  } else {
    gather<__half2><<<grid, kThreads, 0, stream>>>(*s);
  }
  auto error = cudaGetLastError();
  return error == cudaSuccess ? kDone : kCudaError + int(error);
}
