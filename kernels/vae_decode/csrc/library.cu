// The table of what this object holds, and the door to it. TILES is the build's list: X(name) for each compiled convolution.
#include <cuda_runtime.h>

#include "convolution.h"

#define X(name) extern "C" int name(Convolution const*, int64_t*);
TILES
#undef X

namespace {

struct Entry {
  const char* name;
  int (*run)(Convolution const*, int64_t*);
};
#define X(name) {#name, name},
constexpr Entry kEntries[] = {TILES};
#undef X
constexpr int kCount = int(sizeof(kEntries) / sizeof(kEntries[0]));

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
bool pad(int n) { return n == 0 || n == 1; }
bool taps(int n) { return n >= 1 && n <= 3; }

// What the driver would refuse in a tensor map. CUTLASS ends the process in that case, so it is asked here first.
bool plausible(Convolution const& c) {
  bool pointers = c.x && c.weight && c.y && aligned(c.x) && aligned(c.weight) && aligned(c.y) && aligned(c.bias) &&
                  aligned(c.residual);
  bool steps = c.x_step % 8 == 0 && c.y_step % 8 == 0 && c.residual_step % 8 == 0 &&
               c.x_step >= int64_t(c.height) * c.width * c.channels && c.depth * c.x_step < (int64_t(1) << 38);
  bool kernel = taps(c.taps_t) && taps(c.taps_h) && taps(c.taps_w) && pad(c.pad_top) && pad(c.pad_bottom) &&
                pad(c.pad_left) && pad(c.pad_right);
  bool sizes = c.phases > 0 && c.channels > 0 && c.channels % 8 == 0 && c.filters > 0 && c.filters % 8 == 0 &&
               c.width > 0 && c.height > 0 && c.depth >= c.taps_t && c.height + c.pad_top + c.pad_bottom >= c.taps_h &&
               c.width + c.pad_left + c.pad_right >= c.taps_w;
  return pointers && steps && kernel && sizes && !(c.frames_apart && c.phases > 1);
}

}  // namespace

extern "C" int convolution_bytes() { return int(sizeof(Convolution)); }
extern "C" int stencil_bytes() { return int(sizeof(Stencil)); }
extern "C" int tile_count() { return kCount; }
extern "C" const char* tile_name(int tile) { return tile >= 0 && tile < kCount ? kEntries[tile].name : nullptr; }

// workspace_bytes null: launch. Else nothing is launched, and what workspace a launch needs is written to it.
extern "C" int run_convolution(int tile, Convolution const* c, int64_t* workspace_bytes) {
  if (tile < 0 || tile >= kCount) return kUnknownTile;
  return plausible(*c) ? kEntries[tile].run(c, workspace_bytes) : int(kWrongArguments);
}

extern "C" const char* cuda_error(int code) { return cudaGetErrorString(cudaError_t(code)); }
