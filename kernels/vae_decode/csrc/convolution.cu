// One tile shape in one element type; the build compiles this file once for each, with TILE and ELEMENT defined.
#include "convolution.cuh"

using fp16 = cutlass::half_t;
using bf16 = cutlass::bfloat16_t;

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

extern "C" int JOIN(TILE, ELEMENT)(Convolution const* c, int64_t* workspace_bytes) {
  return convolve::TILE<ELEMENT>::run(*c, workspace_bytes);
}
