// The words of CUDA that stencil.cu uses, for a C++ compiler: blocks and threads run one after another.
#pragma once
#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#undef __global__
#undef __device__
#undef __launch_bounds__
#define __global__ static
#define __device__ static
#define __launch_bounds__(threads)
#define blockIdx block_index
#define threadIdx thread_index
#define __float2int_rn(v) int(std::nearbyint(v))
#define cudaGetLastError() cudaSuccess
using std::isfinite;

static uint3 block_index, thread_index;

template <class T>
static T __ldg(const T* p) {
  return *p;
}

template <class Kernel, class Argument>
static void run_on_host(Kernel kernel, dim3 grid, int threads, Argument const& argument) {
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x)
        for (unsigned t = 0; t < unsigned(threads); ++t) {
          block_index = {x, y, z}, thread_index = {t, 0, 0};
          kernel(argument);
        }
}
