// 3-D forward convolutions as implicit matrix products: TMA im2col loads, wgmma on Hopper, tcgen05 on Blackwell.
//
// A convolution's output is packed with channels last, so it is a row-major matrix: rows are output positions, columns
// filters. Both architectures therefore use the matrix-product epilogues (fp32 bias a column, C with beta = 1 as residual),
// and several products are the batch mode L of one launch.
#pragma once
#if !defined(__CUDA_ARCH__)
#undef NDEBUG  // host code keeps CUTLASS's checks of what the driver says to a tensor map; device code has none
#endif
#include <cuda_runtime.h>

#include "cutlass/cutlass.h"
#include "cutlass/kernel_hardware_info.hpp"
// The two above come first: the convolution headers use them without including them.
#include "cute/tensor.hpp"
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/convolution.h"
#include "cutlass/conv/device/conv_universal_adapter.hpp"
#include "cutlass/conv/dispatch_policy.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "convolution.h"

namespace convolve {

using namespace cute;
namespace conv = cutlass::conv;
namespace epilogue = cutlass::epilogue;

constexpr conv::Operator kForward = conv::Operator::kFprop;
using ConvShape = conv::ConvProblemShape<kForward, 3>;
using Taps = Shape<int, int, int, int>;              // channels, taps_w, taps_h, taps_t: CUTLASS's k mode
using ProductShape = Shape<int, int, Taps, int>;     // output positions, filters, k, phases
using Activations = cutlass::layout::TensorNDHWC;
using Matrix = cutlass::layout::RowMajor;
constexpr int kAlignment = 8;                        // elements: 16 bytes, what TMA asks for

template <class Element>
using Fusion = epilogue::fusion::LinCombPerColBias<Element, float, float, Element, float>;

// For CUTLASS the phases are images of one batch, and filters of one large filter bank: one tensor map each.
inline ConvShape conv_shape(Convolution const& c) {
  typename ConvShape::TensorExtent x{c.phases, c.depth, c.height, c.width, c.channels};
  typename ConvShape::TensorExtent weight{c.phases * c.filters, c.taps_t, c.taps_h, c.taps_w, c.channels};
  int64_t row = int64_t(c.width) * c.channels;
  return ConvShape(conv::Mode::kCrossCorrelation, x, {c.depth * c.x_step, c.x_step, row, c.channels, 1}, weight,
                   ConvShape::packed_stride_right_major(weight), {0, c.pad_top, c.pad_left},
                   {0, c.pad_bottom, c.pad_right}, {1, 1, 1}, {1, 1, 1}, 1);
}

// One matrix product; the mode L counts them.
inline ProductShape product_shape(Convolution const& c) {
  int frames = c.depth - c.taps_t + 1;
  int frame = (c.height + c.pad_top + c.pad_bottom - c.taps_h + 1) * (c.width + c.pad_left + c.pad_right - c.taps_w + 1);
  Taps k{c.channels, c.taps_w, c.taps_h, c.taps_t};
  return c.frames_apart ? ProductShape{frame, c.filters, k, frames} : ProductShape{frames * frame, c.filters, k, c.phases};
}

// Walks the k tiles of an output tile in the order asked for. It owns its extents: CUTLASS 4.2's own iterator refers to a
// shape that its kernels pass as a temporary.
struct TapWalk {
  int c, s, r, t, channels, width, height, depth;
  bool taps_first;

  CUTLASS_DEVICE auto operator*() const { return make_coord(c, s, r, t); }

  CUTLASS_DEVICE bool next_tap() {
    if (++s < width) return true;
    s = 0;
    if (++r < height) return true;
    r = 0;
    if (++t < depth) return true;
    t = 0;
    return false;
  }

  CUTLASS_DEVICE TapWalk& operator++() {
    if (taps_first) {
      if (!next_tap()) ++c;
    } else if (++c == channels) {
      c = 0;
      next_tap();
    }
    return *this;
  }
};

// From the start of a tile, whose extents are the k mode of its global tensor; a walk under way (Blackwell loads a tile in
// two calls) goes on.
template <class Iterator, class KShape>
CUTLASS_DEVICE TapWalk walk(Iterator const& iterator, KShape const& extents, bool taps_first) {
  if constexpr (is_same_v<Iterator, TapWalk>) {
    return iterator;
  } else {
    return {0, 0, 0, 0, int(get<0>(extents)), int(get<1>(extents)), int(get<2>(extents)), int(get<3>(extents)), taps_first};
  }
}

// What a main loop is told beyond CUTLASS's own arguments.
struct Order {
  bool taps_first;
  int filters_apart;  // filters from one product's weights to the next one's: 0 where all products share them
};

inline Order order(Convolution const& c) { return {c.taps_first != 0, c.frames_apart ? 0 : c.filters}; }

// Adds the mode L to a tiled tensor of coordinates.
template <class Tensor, class Step>
CUTLASS_DEVICE auto with_products(Tensor const& tensor, int products, Step const& step) {
  constexpr int kModes = decltype(rank(tensor.layout()))::value;
  return make_tensor(tensor.data(), append<kModes + 1>(tensor.layout(), make_layout(products, step)));
}

// Where the next product's data begin, along the positions of x (im2col counts them through frames and phases alike) and
// along the filters of the weights, whose basis vector is that of a weight tile's first mode.
CUTLASS_DEVICE auto x_apart(int positions) { return positions * E<0>{}; }
template <class WeightTiles>
CUTLASS_DEVICE auto weights_apart(WeightTiles const& tiles, int filters) {
  return filters * stride<0>(tiles);
}

template <class Epilogue, class Element>
typename Epilogue::Arguments epilogue_arguments(Convolution const& c) {
  typename Epilogue::Arguments e{};
  e.thread.alpha = 1.0f;
  e.thread.beta = c.residual ? 1.0f : 0.0f;
  e.thread.bias_ptr = c.bias;
  // With beta = 0 it is never read, but its tensor map must have a valid address.
  e.ptr_C = static_cast<Element const*>(c.residual ? c.residual : c.y);
  e.ptr_D = static_cast<Element*>(c.y);
  get<0>(e.dC) = get<0>(e.dD) = c.filters;
  get<2>(e.dC) = c.residual ? c.residual_step : c.y_step;
  get<2>(e.dD) = c.y_step;
  return e;
}

inline cutlass::KernelHardwareInfo hardware(Convolution const& c) {
  cutlass::KernelHardwareInfo info;
  cudaGetDevice(&info.device_id);
  info.sm_count = c.multiprocessors;
  return info;
}

// Launch, or only say what workspace the launch will need. An Outcome.
template <class Device>
int launch(typename Device::Arguments const& arguments, Convolution const& c, int64_t* workspace_bytes) {
  size_t needed = Device::get_workspace_size(arguments);
  if (workspace_bytes) {
    *workspace_bytes = int64_t(needed);
    return kDone;
  }
  if (Device::can_implement(arguments) != cutlass::Status::kSuccess) return kNotImplementable;
  if (int64_t(needed) > c.workspace_bytes) return kWorkspaceTooSmall;
  auto stream = static_cast<cudaStream_t>(c.stream);
  Device device;
  auto status = device.initialize(arguments, c.workspace, stream);
  if (status == cutlass::Status::kSuccess) status = device.run(stream);
  if (auto error = cudaGetLastError(); error != cudaSuccess) return kCudaError + int(error);
  return status == cutlass::Status::kSuccess ? kDone : kCutlassError + int(status);
}

template <int M, int N>
using Tile = Shape<Int<M>, Int<N>, Shape<_64>>;

// ---- Hopper ------------------------------------------------------------------------------------------------------------

// CUTLASS ships its Hopper convolution main loop only under a kernel with one tile a block. The main loop asks nothing of
// its kernel that the persistent matrix-product kernels do not give, so it runs under those: this is the adapter.
template <class Base>
struct PersistentMainloop : Base {
  // The kernels ask for the rank of these and nothing else.
  using StrideA = Stride<int64_t, _1, int64_t>;
  using StrideB = Stride<int64_t, _1, int64_t>;
  static constexpr int NumProducerThreadEvents = 1;

  struct Arguments {
    typename Base::Arguments pointers;
    ConvShape shape;
    Order order;
  };
  struct Params : Base::Params {
    Order order;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const&, Arguments const& a, void* workspace) {
    return {Base::to_underlying_arguments(a.shape, a.pointers, workspace), a.order};
  }

  template <class Problem>
  static bool can_implement(Problem const&, Arguments const& a) {
    return Base::can_implement(a.shape, a.pointers);
  }

  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const& params) {
    auto [x, weight] = Base::load_init(problem, params);
    int products = get<3>(problem);
    return cute::make_tuple(with_products(x, products, x_apart(get<0>(problem))),
                            with_products(weight, products, weights_apart(weight, params.order.filters_apart)));
  }

  template <class X, class Weight, class Block, class Iterator>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState state, cute::tuple<X, Weight> const& inputs, Block const& block,
                           Iterator const& iterator, int k_tiles, int thread, uint32_t rank,
                           typename Base::TensorStorage& storage) {
    auto product = get<3>(block);
    auto x = get<0>(inputs)(_, _, _, _, product);
    auto weight = get<1>(inputs)(_, _, _, _, product);
    Base::load(params, pipeline, state, cute::make_tuple(x, weight), block,
               walk(iterator, shape<3>(x), params.order.taps_first), k_tiles, thread, rank, storage);
  }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(typename Base::MainloopPipeline pipeline, typename Base::PipelineState state,
                          Accumulators& accumulators, int k_tiles, int thread, typename Base::TensorStorage& storage,
                          Params const& params) {
    // Only the warpgroup matters to the operands in shared memory; saying so keeps their descriptors in uniform registers.
    int warpgroup = __shfl_sync(0xffffffffu, thread / cutlass::NumThreadsPerWarpGroup, 0);
    Base::mma(pipeline, state, accumulators, k_tiles, warpgroup * cutlass::NumThreadsPerWarpGroup, storage, params);
  }
};

template <class Element, class TileShape, class Cluster, class Schedule>
struct Hopper {
  static constexpr bool kCooperative = is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using EpilogueSchedule =
      conditional_t<kCooperative, epilogue::TmaWarpSpecializedCooperative, epilogue::TmaWarpSpecialized>;
  using Epilogue = typename epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, Cluster, epilogue::collective::EpilogueTileAuto, float,
      float, Element, Matrix, kAlignment, Element, Matrix, kAlignment, EpilogueSchedule, Fusion<Element>>::CollectiveOp;

  static constexpr auto kMajor = GMMA::Major::K;
  using Warpgroups = Layout<Shape<conditional_t<kCooperative, _2, _1>, _1, _1>>;
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, TileShape, kMajor, kMajor>(), Warpgroups{}));
  using LoadX = decltype(conv::collective::detail::sm90_cluster_shape_to_im2col_tma_atom(shape<1>(Cluster{})));
  using LoadWeight = decltype(cutlass::gemm::collective::detail::sm90_cluster_shape_to_tma_atom(shape<0>(Cluster{})));

  // The kernel's own barriers lie beside the epilogue's storage: 256 bytes hold them.
  static constexpr int kReserved = int(sizeof(typename Epilogue::SharedStorage)) + 256;
  static constexpr int kCapacity = cutlass::gemm::collective::detail::sm90_smem_capacity_bytes;
  static constexpr int kStages =
      conv::collective::detail::compute_stage_count_or_override<kCapacity, Element, Element, TileShape>(
          conv::collective::StageCountAutoCarveout<kReserved>{});

  template <int Mode>
  static auto shared_layout() {
    constexpr int kMN = size<Mode>(TileShape{}), kK = size<2>(TileShape{});
    using Atom = decltype(cutlass::gemm::collective::detail::ss_smem_selector<kMajor, Element, Int<kMN>, Int<kK>>());
    return tile_to_shape(Atom{}, make_shape(Int<kMN>{}, Int<kK>{}, Int<kStages>{}), Step<_2, _1, _3>{});
  }

  using Policy = conv::MainloopSm90TmaGmmaWarpSpecializedImplicitGemm<kForward, kStages, 3, Cluster, Schedule>;
  using Mainloop = PersistentMainloop<conv::collective::CollectiveConv<
      Policy, TileShape, Element, Element, Mma,
      conv::collective::detail::Sm90ImplicitGemmTileTraits<LoadX, decltype(shared_layout<0>())>,
      conv::collective::detail::Sm90ImplicitGemmTileTraits<LoadWeight, decltype(shared_layout<1>())>>>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<ProductShape, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  static_assert(Kernel::SharedStorageSize <= kCapacity);

  static int run(Convolution const& c, int64_t* workspace_bytes) {
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = product_shape(c);
    arguments.mainloop = {
        {static_cast<Element const*>(c.x), static_cast<Element const*>(c.weight)}, conv_shape(c), order(c)};
    arguments.epilogue = epilogue_arguments<Epilogue, Element>(c);
    arguments.hw_info = hardware(c);
    return launch<Device>(arguments, c, workspace_bytes);
  }
};

// ---- Blackwell ---------------------------------------------------------------------------------------------------------

template <class Base>
struct PhasedMainloop : Base {
  using Base::Base;

  struct Params : Base::Params {
    Order order;
  };

  // Only its type is asked for: PhasedKernel gives the value.
  static ProductShape get_problem_shape_MNKL(ConvShape const&) { return {}; }

  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const& params, typename Base::TensorStorage& storage) {
    auto [x, weight, x_parts, weight_parts, x_shared, weight_shared, x_mask, weight_mask] =
        Base::load_init(problem, params, storage);
    int products = get<3>(problem);
    return cute::make_tuple(x, weight, with_products(x_parts, products, x_apart(get<0>(problem))),
                            with_products(weight_parts, products, weights_apart(weight, params.order.filters_apart)),
                            x_shared, weight_shared, x_mask, weight_mask);
  }

  template <class Inputs, class Coordinate, class Iterator>
  CUTLASS_DEVICE auto load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::MainloopPipelineState state, Inputs const& inputs, Coordinate const& coordinate,
                           Iterator const& iterator, int k_tiles) {
    auto [x, weight, x_parts, weight_parts, x_shared, weight_shared, x_mask, weight_mask] = inputs;
    int product = get<3>(coordinate);
    auto one = cute::make_tuple(x, weight, x_parts(_, _, _, product), weight_parts(_, _, _, product), x_shared,
                                weight_shared, x_mask, weight_mask);
    return Base::load(params, pipeline, state, one, coordinate,
                      walk(iterator, shape<3>(x), params.order.taps_first), k_tiles);
  }
};

// CUTLASS's convolution kernel with the shape of the matrix product, phases included, wherever it plans its tiles.
template <class Base>
struct PhasedKernel : Base {
  using Params = typename Base::Params;

  struct Arguments : Base::Arguments {
    ProductShape product{};
    Order order{};
  };

  static Params to_underlying_arguments(Arguments const& a, void*) {
    return {a.product,
            {Base::CollectiveMainloop::to_underlying_arguments(a.problem_shape, a.mainloop, nullptr, a.hw_info), a.order},
            Base::CollectiveEpilogue::to_underlying_arguments(a.product, a.epilogue, nullptr),
            Base::TileScheduler::to_underlying_arguments(a.product, typename Base::TileShape{},
                                                         typename Base::AtomThrShapeMNK{}, typename Base::ClusterShape{},
                                                         a.hw_info, a.scheduler, nullptr),
            a.hw_info};
  }

  // Neither the epilogue nor the dynamic scheduler keeps anything in global memory.
  static size_t get_workspace_size(Arguments const&) { return 0; }
  static cutlass::Status initialize_workspace(Arguments const&, void*, cudaStream_t, cutlass::CudaHostAdapter*) {
    return cutlass::Status::kSuccess;
  }

  static bool can_implement(Arguments const& a) {
    return Base::CollectiveMainloop::can_implement(a.problem_shape, a.mainloop) &&
           Base::CollectiveEpilogue::can_implement(a.product, a.epilogue) && Base::TileScheduler::can_implement(a.scheduler);
  }
};

template <class Element, class TileShape, class Cluster, class Schedule, class EpilogueSchedule>
struct Blackwell {
  using Arch = cutlass::arch::Sm100;
  using Epilogue = typename epilogue::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, TileShape, Cluster, epilogue::collective::EpilogueTileAuto, float, float,
      Element, Matrix, kAlignment, Element, Matrix, kAlignment, EpilogueSchedule, Fusion<Element>>::CollectiveOp;
  using Mainloop = PhasedMainloop<typename conv::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassTensorOp, kForward, Element, Activations, kAlignment, Element, Activations, kAlignment,
      float, TileShape, Cluster,
      conv::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>, Schedule>::CollectiveOp>;
  using Kernel = PhasedKernel<conv::kernel::ConvUniversal<ConvShape, Mainloop, Epilogue, void>>;
  using Device = conv::device::ConvUniversalAdapter<Kernel>;

  static int run(Convolution const& c, int64_t* workspace_bytes) {
    typename Kernel::Arguments arguments{};
    arguments.problem_shape = conv_shape(c);
    arguments.mainloop = {static_cast<Element const*>(c.x), static_cast<Element const*>(c.weight)};
    arguments.epilogue = epilogue_arguments<Epilogue, Element>(c);
    arguments.hw_info = hardware(c);
    arguments.product = product_shape(c);
    arguments.order = order(c);
    return launch<Device>(arguments, c, workspace_bytes);
  }
};

// ---- Tiles -------------------------------------------------------------------------------------------------------------
// Positions x filters of an output tile, and the cluster of blocks that share loads. Each Hopper tile here was the fastest
// on at least one layer of the decoder on an H200; the Blackwell tiles are compiled, not run.

using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using PingPong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
template <class Element> using cooperative_128x256 = Hopper<Element, Tile<128, 256>, Shape<_1, _1, _1>, Cooperative>;
template <class Element> using cooperative_128x256_2x1 = Hopper<Element, Tile<128, 256>, Shape<_2, _1, _1>, Cooperative>;
template <class Element> using cooperative_256x128_1x2 = Hopper<Element, Tile<256, 128>, Shape<_1, _2, _1>, Cooperative>;
template <class Element> using pingpong_128x128_2x1 = Hopper<Element, Tile<128, 128>, Shape<_2, _1, _1>, PingPong>;

using OneSm = conv::KernelImplicitTmaWarpSpecialized1SmSm100;
using TwoSm = conv::KernelImplicitTmaWarpSpecialized2SmSm100;
template <class Element>
using one_sm_128x128 = Blackwell<Element, Tile<128, 128>, Shape<_1, _1, _1>, OneSm, epilogue::TmaWarpSpecialized1Sm>;
template <class Element>
using two_sm_256x256 = Blackwell<Element, Tile<256, 256>, Shape<_2, _1, _1>, TwoSm, epilogue::TmaWarpSpecialized2Sm>;

}  // namespace convolve
