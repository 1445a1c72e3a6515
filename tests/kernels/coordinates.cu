// For every product, position and tap: the coordinates that convolution.cuh's main loop gives to the copy engine, against
// coordinates counted by hand. Runs on the host: no GPU, no driver (without which no tensor map can be made, and none is used).
#include <cuda_runtime.h>

// The headers as they are, then the main loops again as functions of the host.
#include "cutlass/cutlass.h"
#include "cutlass/kernel_hardware_info.hpp"
#include "cute/tensor.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#undef CUTLASS_DEVICE
#define CUTLASS_DEVICE __forceinline__ __host__ __device__
#define __shfl_sync(mask, value, lane) (value)
#include "convolution.cuh"

#include <cstdio>

using namespace cute;
using Built = convolve::cooperative_128x256_2x1<cutlass::half_t>;
constexpr int kRows = 128, kColumns = 256, kDepth = 64;

struct Count {
  int checked = 0, wrong = 0;
  void operator()(bool right) {
    ++checked;
    wrong += !right;
  }
};

// The copy engine's coordinates of x are (c, (column, row, frame), phase, (tap column, tap row, tap frame)), those of the
// weights (c, filter, tap column, tap row, tap frame).
template <class X, class Weight>
void check(Convolution const& c, X const& x, Weight const& weight, Count& count) {
  auto product = convolve::product_shape(c);
  int positions = get<0>(product), columns = c.width + c.pad_left + c.pad_right - c.taps_w + 1;
  int rows = c.height + c.pad_top + c.pad_bottom - c.taps_h + 1;
  for (int l = 0; l < get<3>(product); ++l)
    for (int t = 0; t < c.taps_t; ++t)
      for (int r = 0; r < c.taps_h; ++r)
        for (int s = 0; s < c.taps_w; ++s)
          for (int k = 0; k < c.channels; k += kDepth) {
            auto tile = make_coord(k / kDepth, s, r, t);
            for (int m = 0; m < positions; m += 37) {
              auto at = x(m % kRows, 0, m / kRows, tile, l);
              int position = c.frames_apart ? l * positions + m : m;
              count(get<0>(at) == k && get<1, 0>(at) == position % columns - c.pad_left &&
                    get<1, 1>(at) == position / columns % rows - c.pad_top && get<1, 2>(at) == position / columns / rows &&
                    get<2>(at) == (c.frames_apart ? 0 : l) && get<3, 0>(at) == s && get<3, 1>(at) == r && get<3, 2>(at) == t);
            }
            for (int n = 0; n < c.filters; n += 13) {
              auto at = weight(n % kColumns, 0, n / kColumns, tile, l);
              count(get<0>(at) == k && get<1>(at) == n + (c.frames_apart ? 0 : l * c.filters) && get<2>(at) == s &&
                    get<3>(at) == r && get<4>(at) == t);
            }
          }
}

void run(const char* name, Convolution c, int& wrong) {
  c.x_step = int64_t(c.height) * c.width * c.channels;
  typename Built::Mainloop::Arguments arguments{{nullptr, nullptr}, convolve::conv_shape(c), convolve::order(c)};
  auto params = Built::Mainloop::to_underlying_arguments(convolve::product_shape(c), arguments, nullptr);
  auto [x, weight] = Built::Mainloop{}.load_init(convolve::product_shape(c), params);
  Count count;
  check(c, x, weight, count);
  printf("%s: %d wrong of %d\n", name, count.wrong, count.checked);
  wrong += count.wrong + (count.checked == 0);
}

// Each order of taps visits every k tile once.
void walks(bool taps_first, int& wrong) {
  auto walk = convolve::walk(0, make_shape(3, 2, 3, 3), taps_first);
  bool seen[3][2][3][3] = {};
  for (int i = 0; i < 3 * 2 * 3 * 3; ++i, ++walk) {
    auto [c, s, r, t] = *walk;
    bool& place = seen[c][s][r][t];
    bool expected = taps_first ? i / 18 == c : i % 3 == c;
    wrong += place || !expected;
    place = true;
  }
}

int main() {
  Convolution c{};
  c.phases = 6, c.depth = 3, c.height = 7, c.width = 11, c.channels = 128, c.filters = 264;
  c.taps_t = 1, c.taps_h = c.taps_w = 3;
  c.pad_top = c.pad_bottom = c.pad_left = c.pad_right = 1;
  int wrong = 0;
  run("phases", c, wrong);
  c.pad_top = c.pad_right = 0, c.taps_w = 2;
  run("phases with pads on one side", c, wrong);
  c.phases = 1, c.depth = 6, c.taps_t = 3, c.taps_w = 3, c.pad_right = 1;
  run("one product", c, wrong);
  c.frames_apart = 1;
  run("frames apart", c, wrong);
  walks(true, wrong);
  walks(false, wrong);
  return wrong != 0;
}
