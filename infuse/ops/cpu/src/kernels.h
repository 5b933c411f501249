// The kernels as a table of function pointers, one table per instruction set. Plain pointers and sizes, no PyTorch.
//
// Suffixes: R rows, C columns (the last axis), row strides in elements. bf16 and fp16 are passed as uint16_t.
#pragma once

#include "attention_kernels.h"
#include "expert_kernels.h"
#include "linear_kernels.h"
#include "quantize_kernels.h"
#include "recurrence_kernels.h"
#include "router_kernels.h"
#include "types.h"

namespace infuse {

// y = norm(x [+ residual]) over the last axis. If `residual` is given, `sum` receives x + residual rounded to the type.
struct NormArgs {
  const void* x;
  const void* residual;  // or null
  void* sum;             // with residual
  void* y;
  const void* weight;  // or null
  const void* bias;    // or null
  int64_t rows, columns;
  float eps, offset;
  bool centred;  // LayerNorm subtracts the mean, RMSNorm does not
  bool scales;   // multiplies by the weight alone, and measures nothing
  Type type;
};

constexpr int kCoefficients = 3;

// y = act(group_norm(x + added)) over [batch, channels, positions], in three steps: sums for each channel, coefficients
// for each channel, y. `chunks` parts of the positions are summed one by one (contiguous: 1).
struct GroupNormArgs {
  const void* x;
  void* y;             // may be x
  const void* weight;  // or null
  const void* bias;    // or null
  const void* added;   // [batch, channels] with rows `added_step` apart, or null
  int64_t added_step;
  int64_t batch, channels, positions, groups, chunks;
  double eps;
  bool channels_last, silu;
  Type type;
  float* sums;          // [batch, chunks, 2, channels]
  float* coefficients;  // [batch, kCoefficients, channels]: mean less added, scale, bias
};

struct GroupNormKernels {
  void (*measure)(const GroupNormArgs&, int64_t begin, int64_t end);  // batch * (channels last: chunks, else channels)
  void (*solve)(const GroupNormArgs&, int64_t begin, int64_t end);    // samples
  void (*apply)(const GroupNormArgs&, int64_t begin, int64_t end);    // batch * (channels last: positions, else channels)
};

// sum = residual + gate * x if there is a gate; y = norm(x or sum) * (1 + scale) + shift if there is a scale: a layer norm
// if `centred`, else an RMS norm. Rows of `tokens` share one row of gate, scale and shift, whose strides are *_b; these
// are float32 if `wide`, else of the type of x.
struct ModulatedArgs {
  const void *x, *gate, *residual, *scale, *shift;
  void *sum, *y;
  int64_t tokens, columns, gate_b, scale_b, shift_b;
  float eps;
  Type type;
  bool wide, centred;
};

// y [B, tokens[0] + tokens[1], 3 heads, width] from both x; q and k are the weights of their norms, or null.
struct JoinedArgs {
  const void *x[2], *q[2], *k[2];
  const float *cos, *sin;  // [all tokens, width], or null
  void* y;
  int64_t tokens[2], heads, width;
  float eps;
  Type type;
};

// to[i] = from[0][i] + from[1][i] + ...
struct SumArgs {
  const void* const* from;
  void* to;
  int count;
  Type type;
};

// Instructions that multiply and add, in the order of INSTRUCTIONS in infuse/profile/probe.py.
enum class Instruction { float_fma, bf16_dot, byte_dot, amx_bf16 };

struct Kernels {
  const char* isa;
  void (*norm)(const NormArgs&, int64_t begin, int64_t end);  // rows [begin, end)
  GroupNormKernels group_norm;
  void (*modulated)(const ModulatedArgs&, int64_t begin, int64_t end);  // rows [begin, end)
  void (*joined)(const JoinedArgs&, int64_t begin, int64_t end);  // tokens [begin, end) of all batch rows
  LinearKernels linear;
  PanelKernels panels;
  AttentionKernels attention;
  ExpertKernels experts;
  RouterKernels router;
  QuantizeKernel quantize;
  RecurrenceKernels recurrence;
  uint64_t (*read_bytes)(const void* data, int64_t bytes);  // probe.h
  double (*multiply_registers)(Instruction, int64_t rounds);
  void (*sum_arrays)(const SumArgs&, int64_t begin, int64_t end);  // shared.h; elements [begin, end)
};

// Defined by kernels.cpp, compiled once for each instruction set.
const Kernels& kernels_generic();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512_bf16();
const Kernels& kernels_avx512_amx();

// Defined by detect.cpp, compiled without instruction set flags.
const Kernels& kernels();
// Whether products of many rows are left to PyTorch. In bf16: it may use AMX here, and the chosen level does not. In
// float32: this is an Intel processor, for which its library (MKL) is made; on AMD's, MKL reaches 0.35 of the peak.
bool left_to_pytorch(Type type);
// Whether weights that outgrow all caches are to be fetched past the outer ones. On an AMD EPYC (Zen 5), steps take 3 to
// 4 % less time; other processors have not been measured.
bool reads_past_caches();
// Whether weights, keys and values are to be fetched into the outer caches alone, and for one row of x from near by: on
// AMD's Zen 4. With 4 to 8 rows of x in bf16, products then take 0.6 to 0.7 of the time. With one row, two cores read 65
// GB/s where memory gives that much, as without fetches; if each line is fetched 4096 bytes ahead or more, they read 42.
bool fetches_into_outer();
// Whether AMX multiplies bf16 here, in our products of many rows or in PyTorch's.
bool amx_multiplies();
// All levels, highest first, one per line, followed by " missing" if this machine lacks it, " refused" if the system
// does not let this process use it, and " unbuilt" if this binary lacks it.
const char* level_names();

}  // namespace infuse
