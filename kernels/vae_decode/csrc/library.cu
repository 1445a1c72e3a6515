// The table of what this object holds. TILES is the build's list: X(tile, element) for each compiled convolution.
#include <cuda_runtime.h>

#include "convolution.h"

#define X(tile, element) extern "C" int tile##_##element(Convolution const*, int64_t*);
TILES
#undef X

namespace {
struct Entry {
  const char* name;
  int (*run)(Convolution const*, int64_t*);
};
#define X(tile, element) {#tile "_" #element, tile##_##element},
constexpr Entry kEntries[] = {TILES};
#undef X
constexpr int kCount = int(sizeof(kEntries) / sizeof(kEntries[0]));
}  // namespace

extern "C" int convolution_bytes() { return int(sizeof(Convolution)); }
extern "C" int head_bytes() { return int(sizeof(Head)); }
extern "C" int tile_count() { return kCount; }
extern "C" const char* tile_name(int tile) { return tile >= 0 && tile < kCount ? kEntries[tile].name : nullptr; }

// workspace_bytes null: launch. Else nothing is launched, and the bytes of workspace that a launch needs are written to it.
extern "C" int run_convolution(int tile, Convolution const* c, int64_t* workspace_bytes) {
  return tile >= 0 && tile < kCount ? kEntries[tile].run(c, workspace_bytes) : int(kUnknownTile);
}

extern "C" const char* cuda_error(int code) { return cudaGetErrorString(cudaError_t(code)); }
