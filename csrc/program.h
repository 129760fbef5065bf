// The program format's numbers (docs/program_format.md) and the decoded, validated form of a
// program.
//
// Every number that Python needs is listed in an X-macro below, and module.cc hands the same lists
// to Python, so the encoder and this decoder cannot drift apart.

#ifndef RECOM_JAX_CSRC_PROGRAM_H_
#define RECOM_JAX_CSRC_PROGRAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace recom {

inline constexpr int64_t kProgramMagic = 0x474f52504d434552;  // "RECMPROG"
inline constexpr int64_t kPackMagic = 0x314b4341504d4352;     // "RCMPACK1" in memory order
inline constexpr int64_t kVersion = 1;
inline constexpr int64_t kSumsMagic = 0x534d5553434552;  // "RECSUMS"
inline constexpr int64_t kSumsVersion = 1;

// clang-format off
#define RECOM_DTYPES(X)                                                                         \
  X(PRED, 1) X(S8, 2) X(S16, 3) X(S32, 4) X(S64, 5) X(U8, 6) X(U16, 7) X(U32, 8) X(U64, 9)      \
  X(F16, 10) X(F32, 11) X(F64, 12) X(BF16, 16) X(F8E5M2, 19) X(F8E4M3FN, 20)
#define RECOM_SLOT_KINDS(X) X(IMM, 0) X(DIM, 1) X(OPERAND, 2) X(RESULT, 3)
#define RECOM_DIM_KINDS(X)                                                                      \
  X(const, 0) X(operand_axis, 1) X(result_axis, 2) X(add, 3) X(sub, 4) X(mul, 5) X(floordiv, 6)
#define RECOM_OPCODES(X)                                                                        \
  X(LOAD, 1) X(AFFINE, 2) X(CONST, 3) X(EXPAND, 4) X(UNARY, 5) X(BINARY, 6) X(SELECT, 7)        \
  X(CONVERT, 8) X(BITCAST, 9) X(SEARCH, 10) X(SEARCH_UNIFORM, 11) X(INDEX, 12)                  \
  X(PREDICATE, 13) X(TAKE, 14) X(POOL, 15) X(ACC, 16) X(REGION, 17) X(JREGION, 18) X(STORE, 19)
#define RECOM_UNARY_OPS(X)                                                                      \
  X(neg, 0) X(abs, 1) X(sign, 2) X(not, 3) X(floor, 4) X(ceil, 5) X(round_even, 6)              \
  X(round_away, 7) X(sqrt, 8) X(is_finite, 9) X(popcnt, 10) X(clz, 11)
#define RECOM_BINARY_OPS(X)                                                                     \
  X(add, 0) X(sub, 1) X(mul, 2) X(div, 3) X(rem, 4) X(max, 5) X(min, 6) X(and, 7) X(or, 8)      \
  X(xor, 9) X(shl, 10) X(shr_l, 11) X(shr_a, 12) X(eq, 13) X(ne, 14) X(lt, 15) X(le, 16)        \
  X(gt, 17) X(ge, 18)
#define RECOM_COMBINES(X) X(SUM, 0) X(MAX, 1) X(MIN, 2) X(PROD, 3)
#define RECOM_SEARCH_MODES(X)                                                                   \
  X(SCAN, 0) X(COMPARE_ALL, 1) X(SORTED, 2) X(SPLITS, 3) X(LENGTHS, 4)
#define RECOM_SIDES(X) X(LEFT, 0) X(RIGHT, 1)
#define RECOM_INDEX_MODES(X) X(CLIP, 0) X(FILL, 1)
#define RECOM_FLAGS(X) X(ONE_HOT, 1)
#define RECOM_SPACES(X) X(bag, 0) X(pos, 1)

#define RECOM_ENUMERATOR(name, value) k_##name = value,
namespace dtype { enum : int { RECOM_DTYPES(RECOM_ENUMERATOR) k_count = 21 }; }
namespace slot_kind { enum : int { RECOM_SLOT_KINDS(RECOM_ENUMERATOR) k_count = 4 }; }
namespace dim_kind { enum : int { RECOM_DIM_KINDS(RECOM_ENUMERATOR) k_count = 7 }; }
namespace opcode { enum : int { RECOM_OPCODES(RECOM_ENUMERATOR) k_count = 20 }; }
namespace unary { enum : int { RECOM_UNARY_OPS(RECOM_ENUMERATOR) k_count = 12 }; }
namespace binary { enum : int { RECOM_BINARY_OPS(RECOM_ENUMERATOR) k_count = 19 }; }
namespace combine { enum : int { RECOM_COMBINES(RECOM_ENUMERATOR) k_count = 4 }; }
namespace search_mode { enum : int { RECOM_SEARCH_MODES(RECOM_ENUMERATOR) k_count = 5 }; }
namespace index_mode { enum : int { RECOM_INDEX_MODES(RECOM_ENUMERATOR) k_count = 2 }; }
namespace flag { enum : int { RECOM_FLAGS(RECOM_ENUMERATOR) k_all = 1 }; }
#undef RECOM_ENUMERATOR
// clang-format on

// Bytes of one element; 0 for a number that is no dtype.
inline int element_size(int64_t t) {
  switch (t) {
    case dtype::k_PRED:
    case dtype::k_S8:
    case dtype::k_U8:
    case dtype::k_F8E5M2:
    case dtype::k_F8E4M3FN:
      return 1;
    case dtype::k_S16:
    case dtype::k_U16:
    case dtype::k_F16:
    case dtype::k_BF16:
      return 2;
    case dtype::k_S32:
    case dtype::k_U32:
    case dtype::k_F32:
      return 4;
    case dtype::k_S64:
    case dtype::k_U64:
    case dtype::k_F64:
      return 8;
    default:
      return 0;
  }
}
inline bool is_float8(int t) { return t == dtype::k_F8E5M2 || t == dtype::k_F8E4M3FN; }
// Floats of 8 and 16 bits, which travel as float32.
inline bool is_half(int t) { return t == dtype::k_F16 || t == dtype::k_BF16 || is_float8(t); }
inline bool is_float(int t) { return is_half(t) || t == dtype::k_F32 || t == dtype::k_F64; }
inline bool is_integer(int t) { return t >= dtype::k_S8 && t <= dtype::k_U64; }

// A malformed program, binding or call. Its text reaches the user.
struct ProgramError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct Dim {
  int kind;
  int64_t a, b;
};

struct Register {
  bool pos;  // one value per position (else per bag)
  int dtype;
  int width_slot;  // -1: scalar
  int size;        // bytes of one element
  int writes = 0, reads = 0;
  int writer = -1;       // the op that writes it (the last one)
  bool uniform = false;  // a CONST that every reader takes as an immediate: never materialised
  int word = -1;         // word of the column's values: its place in the scratch, in bytes
};

// One decoded instruction. Registers and slots are -1 where an opcode has none.
struct Op {
  int op = 0;
  int sub = 0;   // unary or binary op, search or index mode, combine kind
  int side = 0;  // search side
  int flags = 0;
  bool pos = false;  // inside a region
  int dst = -1, a = -1, b = -1, c = -1;
  int buffer = -1;           // OPERAND or RESULT slot
  int offset = -1, n = -1;   // offset or base; a count, row stride or total
  int fill = -1, init = -1;  // immediates (CONST: fill)
  int feature = -1;          // feature stride slot of a row LOAD or STORE
  std::vector<int> strides;  // stride slots; REGION: inner sizes
  int words = 0;             // first derived word in the column's values (see plan.cc)
  int body_end = 0;          // REGION, JREGION: index one past the body
  int region = -1;           // the enclosing region's op index
  int n_seg_ops = 0;         // JREGION: leading body ops that compute seg
  int fuse_store = -1;       // TAKE, POOL: the only reader, a STORE that may be written through
  int fused_from = -1;       // STORE: that TAKE or POOL
  int total = -1;            // SEARCH by SPLITS or LENGTHS: positions
  int rows_slot = -1;        // ONE_HOT: rows of the table (from the INDEX that made the ids)
};

// A SEARCH among the starts of bags, which the call makes of splits or lengths.
inline bool by_bags(const Op& o) {
  return o.op == opcode::k_SEARCH &&
         (o.sub == search_mode::k_SPLITS || o.sub == search_mode::k_LENGTHS);
}

struct ColumnClass {
  std::vector<int> slot_kinds;
  std::vector<Register> regs;
  std::vector<int> outer;
  std::vector<Op> ops;
  // Pairs of width slots that must hold the same value at the call.
  std::vector<std::pair<int, int>> equal_widths;
  int n_words = 0;  // slots plus derived words of one column
  bool jagged = false;
  // The TAKE of a class that computes ids, looks rows up and stores them, and nothing else; or -1.
  int plain_take = -1;
};

struct Column {
  int cls;
  std::vector<int64_t> slots;
};

struct BufferType {
  int dtype;
  int rank;
};

class Plan;

struct Program {
  std::vector<BufferType> operands, results;
  std::vector<Dim> dims;
  std::vector<ColumnClass> classes;
  std::vector<Column> columns;

  // Plans (plan.h) of the last few shapes this program was called with.
  mutable std::mutex plans_mutex;
  mutable std::vector<std::shared_ptr<const Plan>> plans;
};

// Reads and checks a program (little-endian int64 words). Throws ProgramError.
std::shared_ptr<const Program> decode_program(std::string_view bytes);

// As decode_program, through the process-wide cache. The key is `hash`; an entry whose bytes
// differ is decoded afresh, so a wrong hash costs time, never a wrong answer.
std::shared_ptr<const Program> cached_program(std::string_view hash, std::string_view bytes);

struct Stats {
  std::atomic<int64_t> programs_decoded{0}, program_cache_hits{0}, programs_cached{0};
  std::atomic<int64_t> plans_built{0}, plans_streaming{0}, calls{0}, chunks_run{0},
      tables_scanned{0};
  std::atomic<int64_t> row_sums{0};
};
Stats& stats();

}  // namespace recom

#endif  // RECOM_JAX_CSRC_PROGRAM_H_
