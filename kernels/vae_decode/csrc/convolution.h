// What crosses the border between Python (built.py mirrors these structures with ctypes) and the kernels. Plain C: no
// PyTorch header is needed, so one object serves every version of PyTorch.
#pragma once
#include <cstdint>

// y = convolution(x, weight) + bias + residual, accumulated in fp32 and rounded once, channels last. One launch computes
// several matrix products: the phases of a layer (one shape, different data and weights), or the frames of y where they
// lie apart in memory. No padding in time: the history stands in front of x.
struct Convolution {
  const void* x;         // [phases, depth, height, width, channels]
  const void* weight;    // [phases, filters, taps_t, taps_h, taps_w, channels]
  const float* bias;     // [filters], the same for each phase, or null
  const void* residual;  // as y, or null
  void* y;               // [phases, depth - taps_t + 1, height + pads - taps_h + 1, width + pads - taps_w + 1, filters]
  void* workspace;
  int64_t workspace_bytes;
  void* stream;          // cudaStream_t
  int64_t x_step;        // elements from one frame of x to the next
  int64_t residual_step, y_step;  // elements from one product to the next
  int32_t phases, depth, height, width, channels, filters;
  int32_t taps_t, taps_h, taps_w;
  int32_t pad_top, pad_bottom, pad_left, pad_right;
  int32_t frames_apart;     // 1: each frame of y is a product (with one phase); 0: each phase is
  int32_t taps_first;       // 1: every tap of 64 channels, then the next 64; 0: all channels of a tap, then the next tap
  int32_t multiprocessors;  // of the current device
};

// The last convolution's second half: nine taps that were moved into channels are gathered, summed and written.
struct Stencil {
  const void* values;   // 16 bit [depth, rows + 2, width, channels]: channel 12 * (3 * tap_row + tap_column) + output
  const float* bias;    // [12]
  void* out;            // uint8 [depth, 2 * rows, 2 * width, 3], or fp32 [depth, rows, width, 12]
  int32_t* finite;      // set to 0 where a value is NaN or infinite
  void* stream;         // cudaStream_t
  int64_t values_step, out_step;  // elements from one frame to the next
  int32_t depth, rows, width, channels;
  int32_t bfloat16, as_float;
};

enum Outcome : int32_t {
  kDone = 0,
  kUnknownTile = 1,
  kWrongArguments = 2,
  kNotImplementable = 3,
  kWorkspaceTooSmall = 4,
  kCudaError = 1000,     // + cudaError_t
  kCutlassError = 2000,  // + cutlass::Status
};
