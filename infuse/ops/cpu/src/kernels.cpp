// All kernels of one instruction set. Compiled once for each set: INFUSE_ISA names the namespace, and the compiler
// flags select the instructions.
#include "kernels.h"

#include "attention_tiles.h"
#include "experts.h"
#include "group_norm.h"
#include "joined.h"
#include "linear.h"
#include "modulated.h"
#include "norm.h"
#include "quantize.h"
#include "probe.h"
#include "recurrence.h"
#include "router.h"
#include "selective_scan.h"
#include "shared.h"

#define INFUSE_JOIN(a, b) a##b
#define INFUSE_TABLE(isa) INFUSE_JOIN(kernels_, isa)
#define INFUSE_TEXT(isa) #isa
#define INFUSE_NAME(isa) INFUSE_TEXT(isa)

namespace infuse {

#if defined(__AMX_BF16__)

// AMX multiplies bf16 by tiles. The other kernels are those of avx512_bf16: a second copy takes 40 s to compile.
const Kernels& INFUSE_TABLE(INFUSE_ISA)() {
  static const Kernels table = [] {
    Kernels made = kernels_avx512_bf16();
    made.isa = INFUSE_NAME(INFUSE_ISA);
    made.linear.tiles.bf16 = INFUSE_ISA::plain_tiles<INFUSE_ISA::bf16>();
    made.panels.tiles.bf16 = INFUSE_ISA::panel_tiles<INFUSE_ISA::bf16>();
    made.attention.tile = INFUSE_ISA::attend_tile;
    made.attention.tile_bytes = INFUSE_ISA::tile_bytes;
    made.multiply_registers = INFUSE_ISA::multiply_registers;
    return made;
  }();
  return table;
}

#else

const Kernels& INFUSE_TABLE(INFUSE_ISA)() {
  static const Kernels table = {
      INFUSE_NAME(INFUSE_ISA),
      INFUSE_ISA::norm,
      {INFUSE_ISA::measure_groups, INFUSE_ISA::solve_groups, INFUSE_ISA::apply_groups},
      INFUSE_ISA::modulated,
      INFUSE_ISA::joined,
      INFUSE_ISA::linear_kernels(),
      INFUSE_ISA::panel_kernels(),
      INFUSE_ISA::attention_kernels(),
      INFUSE_ISA::expert_kernels(),
      INFUSE_ISA::router_kernels(),
      INFUSE_ISA::quantize,
      {INFUSE_ISA::convolve, INFUSE_ISA::scan, INFUSE_ISA::gated_norm, INFUSE_ISA::selective,
       INFUSE_ISA::channel_decay},
      INFUSE_ISA::read_bytes,
      INFUSE_ISA::multiply_registers,
      INFUSE_ISA::sum_arrays,
  };
  return table;
}

#endif

}  // namespace infuse
