// AMX on processors that lack it: a handler of SIGILL that decodes the instruction, executes it on tiles of the thread's own and goes on
// behind it. For tests alone: each instruction is a signal. Built and loaded by amx.py.
//
// As Intel's Software Developer's Manual, volume 2, defines the instructions: LDTILECFG, STTILECFG, TILERELEASE, TILEZERO,
// TILELOADD, TILELOADDT1, TILESTORED, TDPBF16PS. What would be an exception there ends the program here with a text. So does
// palette 0, which the manual allows: nobody means it who does not say TILERELEASE.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Configuration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Configuration) == 64);

struct State {
  Configuration now;  // palette 0: not configured
  alignas(64) uint8_t data[kTiles][kRows][kRowBytes];
};
thread_local State state;

struct sigaction before;
std::atomic<int64_t> executed{0}, products{0}, configurations{0}, releases{0};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "amx emulator: %s\n", what);
  std::abort();
}
void require(bool holds, const char* otherwise) {
  if (!holds) fail(otherwise);
}

// ---- the instruction ----

struct Instruction {
  int prefix;       // 0: none, 1: 66, 2: F3, 3: F2
  int opcode;
  int mod, reg, rm, v;  // the fields of ModRM and VEX.vvvv
  uintptr_t address;    // without the index
  int64_t stride;       // index * scale; 0 without an index
  bool has_sib;
  int bytes;
};

// The general registers in the order of their encoding.
constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// Whether it is a VEX-encoded instruction of 128 bits, W 0, in the map 0F38 with one of AMX's opcodes.
bool decode(const uint8_t* code, const greg_t* registers, Instruction& to) {
  if (code[0] != 0xc4 || (code[1] & 31) != 2 || (code[2] & 0x84) != 0) return false;
  to.prefix = code[2] & 3, to.opcode = code[3];
  if (to.opcode != 0x49 && to.opcode != 0x4b && to.opcode != 0x5c) return false;
  to.v = ~(code[2] >> 3) & 15;
  const int high_index = code[1] & 0x40 ? 0 : 8, high_base = code[1] & 0x20 ? 0 : 8;
  const uint8_t* p = code + 4;
  const uint8_t modrm = *p++;
  to.mod = modrm >> 6, to.reg = (modrm >> 3 & 7) + (code[1] & 0x80 ? 0 : 8), to.rm = modrm & 7;
  to.address = 0, to.stride = 0, to.has_sib = false;
  if (to.mod == 3) {
    to.rm += high_base;
    to.bytes = int(p - code);
    return true;
  }
  bool from_next = false, base = true;
  int number = to.rm + high_base;
  if (to.rm == 4) {
    to.has_sib = true;
    const uint8_t sib = *p++;
    const int index = (sib >> 3 & 7) + high_index;
    if (index != 4) to.stride = int64_t(registers[kRegisters[index]]) << (sib >> 6);
    number = (sib & 7) + high_base;
    base = !((sib & 7) == 5 && to.mod == 0);
  } else if (to.rm == 5 && to.mod == 0) {
    from_next = true, base = false;
  }
  int32_t displacement = 0;
  if (to.mod == 1) {
    displacement = int8_t(*p++);
  } else if (to.mod == 2 || !base) {
    std::memcpy(&displacement, p, 4);
    p += 4;
  }
  to.address = uintptr_t(int64_t(displacement)) + (base ? uintptr_t(registers[kRegisters[number]]) : 0);
  to.bytes = int(p - code);
  if (from_next) to.address += uintptr_t(code + to.bytes);
  return true;
}

// ---- what it does ----

void configure(const Configuration& c) {
  require(c.palette != 0, "LDTILECFG with palette 0");
  require(c.palette == 1, "LDTILECFG with an unknown palette");
  require(c.start_row == 0, "LDTILECFG with a start row");
  for (const uint8_t byte : c.reserved) require(byte == 0, "LDTILECFG with reserved bytes that are not 0");
  for (int t = 0; t < 16; ++t) {
    require(t < kTiles || (c.row_bytes[t] == 0 && c.rows[t] == 0), "LDTILECFG with a tile beyond the eighth");
    require(c.row_bytes[t] <= kRowBytes && c.rows[t] <= kRows, "LDTILECFG with a tile of more than 16 rows or 64 bytes in a row");
    require((c.row_bytes[t] == 0) == (c.rows[t] == 0), "LDTILECFG with rows of 0 bytes or bytes of 0 rows");
  }
  std::memset(&state, 0, sizeof state);
  state.now = c;
  ++configurations;
}

int configured(int tile) {
  require(state.now.palette != 0, "a tile is used in a thread that is not configured");
  require(tile < kTiles && state.now.rows[tile] != 0, "a tile is used that is not configured");
  return tile;
}

void load(int tile, uintptr_t address, int64_t stride) {
  std::memset(state.data[tile], 0, sizeof state.data[tile]);
  for (int r = 0; r < state.now.rows[tile]; ++r) {
    std::memcpy(state.data[tile][r], reinterpret_cast<const void*>(address + uintptr_t(r * stride)), state.now.row_bytes[tile]);
  }
}

void store(int tile, uintptr_t address, int64_t stride) {
  for (int r = 0; r < state.now.rows[tile]; ++r) {
    std::memcpy(reinterpret_cast<void*>(address + uintptr_t(r * stride)), state.data[tile][r], state.now.row_bytes[tile]);
  }
}

float from_bf16(uint32_t high) {
  float f;
  std::memcpy(&f, &high, 4);
  return f;
}

// The products of even and of odd places are added up apart, each step a fused multiply-add; then both, then the sum so far.
// Whoever calls sets what the instruction prescribes: round to nearest even, subnormal numbers are zero, before and after.
void add_products(int to, int x, int y) {
  require(to != x && to != y && x != y, "TDPBF16PS with one tile in two places");
  const Configuration& c = state.now;
  require(c.row_bytes[to] % 4 == 0 && c.row_bytes[x] % 4 == 0 && c.row_bytes[y] % 4 == 0, "TDPBF16PS with rows of part of a word");
  require(c.rows[to] == c.rows[x] && c.row_bytes[to] == c.row_bytes[y] && c.row_bytes[x] / 4 == c.rows[y], "TDPBF16PS: shapes do not fit");
  const int columns = c.row_bytes[to] / 4, depth = c.row_bytes[x] / 4;
  for (int r = 0; r < c.rows[to]; ++r) {
    float even[kRowBytes / 4] = {}, odd[kRowBytes / 4] = {}, sums[kRowBytes / 4];
    uint32_t left[kRowBytes / 4], right[kRowBytes / 4];
    std::memcpy(left, state.data[x][r], sizeof left);
    for (int k = 0; k < depth; ++k) {
      std::memcpy(right, state.data[y][k], sizeof right);
      for (int n = 0; n < columns; ++n) {
        even[n] = __builtin_fmaf(from_bf16(left[k] << 16), from_bf16(right[n] << 16), even[n]);
        odd[n] = __builtin_fmaf(from_bf16(left[k] & 0xffff0000), from_bf16(right[n] & 0xffff0000), odd[n]);
      }
    }
    std::memcpy(sums, state.data[to][r], sizeof sums);
    for (int n = 0; n < columns; ++n) sums[n] = sums[n] + (even[n] + odd[n]);
    std::memcpy(state.data[to][r], sums, size_t(columns) * 4);
    std::memset(state.data[to][r] + columns * 4, 0, size_t(kRowBytes - columns * 4));
  }
  std::memset(state.data[to][c.rows[to]], 0, size_t(kRows - c.rows[to]) * kRowBytes);
  ++products;
}

constexpr int kNone = 0, k66 = 1, kF3 = 2, kF2 = 3;

bool execute(const Instruction& i) {
  const bool memory = i.mod != 3;
  if (i.opcode == 0x49 && memory && i.reg == 0 && i.v == 0 && i.prefix == kNone) {
    Configuration c;
    std::memcpy(&c, reinterpret_cast<const void*>(i.address), sizeof c);
    configure(c);
  } else if (i.opcode == 0x49 && memory && i.reg == 0 && i.v == 0 && i.prefix == k66) {
    std::memcpy(reinterpret_cast<void*>(i.address), &state.now, sizeof state.now);
  } else if (i.opcode == 0x49 && !memory && i.reg == 0 && i.rm == 0 && i.v == 0 && i.prefix == kNone) {
    std::memset(&state, 0, sizeof state);
    ++releases;
  } else if (i.opcode == 0x49 && !memory && i.rm == 0 && i.v == 0 && i.prefix == kF2) {
    std::memset(state.data[configured(i.reg)], 0, sizeof state.data[0]);
  } else if (i.opcode == 0x4b && memory && i.has_sib && i.v == 0 && (i.prefix == kF2 || i.prefix == k66)) {
    load(configured(i.reg), i.address, i.stride);
  } else if (i.opcode == 0x4b && memory && i.has_sib && i.v == 0 && i.prefix == kF3) {
    store(configured(i.reg), i.address, i.stride);
  } else if (i.opcode == 0x5c && !memory && i.prefix == kF3) {
    constexpr unsigned kNearestAndSubnormalsZero = 0x9fc0;  // MXCSR: exceptions masked, flush to zero, denormals are zero
    const unsigned held = _mm_getcsr();
    _mm_setcsr(kNearestAndSubnormalsZero);
    add_products(configured(i.reg), configured(i.rm), configured(i.v));
    _mm_setcsr(held);
  } else {
    return false;
  }
  return true;
}

void handle(int number, siginfo_t* info, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  Instruction instruction;
  if (decode(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers, instruction) && execute(instruction)) {
    registers[REG_RIP] += instruction.bytes;
    ++executed;
  } else if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    signal(number, SIG_DFL);  // the instruction runs again and ends the program
  }
}

}  // namespace

extern "C" {

int amx_install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGILL, &action, &before);
}

int64_t amx_executed() { return executed; }
int64_t amx_products() { return products; }
int64_t amx_configurations() { return configurations; }
int64_t amx_releases() { return releases; }

// For tests of the emulator: what these instructions do to 16 rows of 16 pairs, 16 pairs of 16 columns, and sums, which are added to.
void amx_product(const void* x, const void* y, float* sums, const void* configuration) {
  const int64_t row = kRowBytes;
  asm volatile("ldtilecfg (%0)" : : "r"(configuration) : "memory");
  asm volatile("tileloadd (%0,%1,1), %%tmm3" : : "r"(sums), "r"(row) : "memory");
  asm volatile("tileloadd -64(%0,%1,2), %%tmm4" : : "r"(static_cast<const char*>(x) + 64), "r"(row / 2) : "memory");
  asm volatile("tileloaddt1 1024(%0,%1,1), %%tmm5" : : "r"(static_cast<const char*>(y) - 1024), "r"(row) : "memory");
  asm volatile("tdpbf16ps %tmm5, %tmm4, %tmm3");
  asm volatile("tilestored %%tmm3, (%0,%1,1)" : : "r"(sums), "r"(row) : "memory");
}
void amx_zero(float* sums) {
  asm volatile("tilezero %tmm3");
  asm volatile("tilestored %%tmm3, (%0,%1,1)" : : "r"(sums), "r"(int64_t{kRowBytes}) : "memory");
}
// tdpbf16ps %tmm4, %tmm4, %tmm3, which assemblers refuse.
void amx_one_tile_twice() { asm volatile(".byte 0xc4, 0xe2, 0x5a, 0x5c, 0xdc"); }
void amx_release() { asm volatile("tilerelease" : : : "memory"); }
// The configuration of the calling thread, 64 bytes; zeros where it has none.
void amx_configuration(void* to) { asm volatile("sttilecfg (%0)" : : "r"(to) : "memory"); }
void amx_undefined() { asm volatile("ud2"); }
}
