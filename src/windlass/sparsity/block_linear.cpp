// The three products of a linear layer whose weight stores only kept blocks, on the small matrix
// kernels of torch's own libraries (oneDNN's brgemm, which chooses AVX2, AVX-512 or AMX).
//
// Every element of a result is written by one thread, and its sum has one order, whatever the
// number of threads is. Sums are in float32. What is read more than once is packed first: weights
// and the transposed side of a weight gradient once per call, the rest in the thread that reads it.

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using at::BFloat16;
using at::native::cpublas::brgemm;

constexpr int64_t kTokens = 128;       // of one product, whose sums then stay near the core
constexpr int64_t kDepth = 512;        // tokens that one product of a weight gradient sums over
constexpr int64_t kSumBytes = 1 << 18; // sums of a weight gradient that a thread holds at a time
constexpr int64_t kAhead = 16;         // rows that are prefetched
constexpr int64_t kTasks = 8;           // at least, for each thread
constexpr int64_t kAlignment = 64;

enum Pass : int64_t { kForward, kInputGrad, kWeightGrad };
enum Status : int { kDone, kBadBlock, kFailed };

struct Shape {
  int64_t tokens, in, out, count, block;
  int64_t area() const { return block * block; }
};

template <typename T>
constexpr bool kPaired = sizeof(T) == 2; // brgemm reads two rows of a 16-bit matrix side by side

// ---- packing ----

typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));

// Exchanges the lanes of two rows whose number has bit S set, of the first, or not, of the second.
template <int S, int... L>
inline void swap_lanes(Words& a, Words& b, std::integer_sequence<int, L...>) {
#if defined(__clang__)
  const Words first = __builtin_shufflevector(a, b, (L & S ? L - S + 16 : L)...);
  b = __builtin_shufflevector(a, b, (L & S ? L + 16 : L + S)...);
#else
  const Words first = __builtin_shuffle(a, b, Words{uint32_t(L & S ? L - S + 16 : L)...});
  b = __builtin_shuffle(a, b, Words{uint32_t(L & S ? L + 16 : L + S)...});
#endif
  a = first;
}

template <int S>
inline void swap_rows(Words (&rows)[16]) {
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row)
    if (!(row & S))
      swap_lanes<S>(rows[row], rows[row + S], std::make_integer_sequence<int, 16>{});
}

inline void transpose_square(const uint32_t* in, int64_t in_step, uint32_t* out, int64_t out_step) {
  Words rows[16];
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row) std::memcpy(&rows[row], in + row * in_step, sizeof(Words));
  swap_rows<8>(rows), swap_rows<4>(rows), swap_rows<2>(rows), swap_rows<1>(rows);
#pragma GCC unroll 16
  for (int row = 0; row < 16; ++row) std::memcpy(out + row * out_step, &rows[row], sizeof(Words));
}

// out[column][row] = in[row][column], of 32-bit words
void transpose(const uint32_t* in, int64_t in_step, int64_t rows, int64_t columns, uint32_t* out,
               int64_t out_step) {
  const int64_t row_end = rows & ~15, column_end = columns & ~15;
  for (int64_t row = 0; row < row_end; row += 16)
    for (int64_t column = 0; column < column_end; column += 16)
      transpose_square(in + row * in_step + column, in_step, out + column * out_step + row,
                       out_step);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = row < row_end ? column_end : 0; column < columns; ++column)
      out[column * out_step + row] = in[row * in_step + column];
}

// The 32 halves of two rows one by one, from those of number F on.
typedef uint16_t Halves __attribute__((vector_size(64), aligned(2)));
template <int F, int... L>
inline void weave(const Halves& a, const Halves& b, uint32_t* out,
                  std::integer_sequence<int, L...>) {
#if defined(__clang__)
  const Halves pairs = __builtin_shufflevector(a, b, (F + L / 2 + (L & 1) * 32)...);
#else
  const Halves pairs = __builtin_shuffle(a, b, Halves{uint16_t(F + L / 2 + (L & 1) * 32)...});
#endif
  std::memcpy(out, &pairs, sizeof(Halves));
}

// out[row / 2][column][row % 2] = in[row][column]; an odd last row is followed by zeros
void interleave(const BFloat16* in, int64_t in_step, int64_t rows, int64_t columns, uint32_t* out) {
  const auto* words = reinterpret_cast<const uint16_t*>(in);
  for (int64_t row = 0; row + 1 < rows; row += 2, out += columns) {
    const uint16_t *first = words + row * in_step, *second = first + in_step;
    int64_t column = 0;
    for (; column + 32 <= columns; column += 32) {
      __builtin_prefetch(first + kAhead * in_step + column); // rows are far from each other
      __builtin_prefetch(second + kAhead * in_step + column);
      Halves a, b;
      std::memcpy(&a, first + column, sizeof(Halves));
      std::memcpy(&b, second + column, sizeof(Halves));
      weave<0>(a, b, out + column, std::make_integer_sequence<int, 32>{});
      weave<16>(a, b, out + column + 16, std::make_integer_sequence<int, 32>{});
    }
    for (; column < columns; ++column)
      out[column] = first[column] | uint32_t(second[column]) << 16;
  }
  if (rows % 2)
    for (int64_t column = 0; column < columns; ++column)
      out[column] = words[(rows - 1) * in_step + column];
}

// The right-hand matrix of a product, as brgemm reads it: in[row][column] for rows of `in_step`.
void pack(const float* in, int64_t in_step, int64_t rows, int64_t columns, float* out) {
  for (int64_t row = 0; row < rows; ++row)
    std::copy_n(in + row * in_step, columns, out + row * columns);
}
void pack(const BFloat16* in, int64_t in_step, int64_t rows, int64_t columns, BFloat16* out) {
  interleave(in, in_step, rows, columns, reinterpret_cast<uint32_t*>(out));
}

// The same of the transposed matrix: right-hand matrix [column][row].
void pack_transposed(const float* in, int64_t block, float* out) {
  transpose(reinterpret_cast<const uint32_t*>(in), block, block, block,
            reinterpret_cast<uint32_t*>(out), block);
}
void pack_transposed(const BFloat16* in, int64_t block, BFloat16* out) {
  transpose(reinterpret_cast<const uint32_t*>(in), block / 2, block, block / 2,
            reinterpret_cast<uint32_t*>(out), block);
}

// The left-hand matrix [column][row] of a product, with rows of `depth` elements.
void turn(const float* in, int64_t in_step, int64_t rows, int64_t columns, float* out,
          int64_t depth, uint32_t*) {
  transpose(reinterpret_cast<const uint32_t*>(in), in_step, rows, columns,
            reinterpret_cast<uint32_t*>(out), depth);
}
void turn(const BFloat16* in, int64_t in_step, int64_t rows, int64_t columns, BFloat16* out,
          int64_t depth, uint32_t* pairs) {
  interleave(in, in_step, rows, columns, pairs);
  transpose(pairs, columns, (rows + 1) / 2, columns, reinterpret_cast<uint32_t*>(out), depth / 2);
}

// ---- results ----

inline void round_row(const float* in, int64_t count, float* out) { std::copy_n(in, count, out); }
inline void round_row(const float* in, int64_t count, BFloat16* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, in + i, 4);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    out[i].x = in[i] == in[i] ? rounded : 0x7fc0;
  }
}

template <typename T>
void write_rows(float* sums, int64_t rows, int64_t block, const T* bias, T* out, int64_t step) {
  for (int64_t row = 0; row < rows; ++row, sums += block, out += step) {
    if (bias)
      for (int64_t column = 0; column < block; ++column) sums[column] += float(bias[column]);
    round_row(sums, block, out);
  }
}

// ---- the list of blocks ----

// The blocks of line t, a row or a column, are `order[start[t] .. start[t + 1])`, as listed.
struct Index {
  const int32_t* blocks;
  int side; // of `blocks`: 0 for lines that are rows, 1 for columns
  std::vector<int64_t> start, order;

  Index(const int32_t* list, int line_side, int64_t count, int64_t lines)
      : blocks(list), side(line_side), start(lines + 1), order(count) {
    for (int64_t n = 0; n < count; ++n) ++start[blocks[2 * n + side] + 1];
    for (int64_t line = 0; line < lines; ++line) start[line + 1] += start[line];
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (int64_t n = 0; n < count; ++n) order[next[blocks[2 * n + side]]++] = n;
  }
  int64_t across(int64_t n) const { return blocks[2 * n + 1 - side]; }
};

bool are_inside(const int32_t* blocks, const Shape& shape) {
  const int64_t rows = shape.out / shape.block, columns = shape.in / shape.block;
  for (int64_t n = 0; n < shape.count; ++n)
    if (blocks[2 * n] < 0 || blocks[2 * n] >= rows || blocks[2 * n + 1] < 0 ||
        blocks[2 * n + 1] >= columns)
      return false;
  return true;
}

// ---- memory of one call: what all threads read, then an equal part for each thread ----

int64_t aligned(int64_t nbytes) { return at::divup(nbytes, kAlignment) * kAlignment; }

struct Workspace {
  int64_t common, each; // bytes

  template <typename T>
  static Workspace of(Pass pass, const Shape& shape) {
    const int64_t item = sizeof(T), values = shape.count * shape.area() * item;
    if (pass == kWeightGrad) {
      const int64_t tokens = at::divup(shape.tokens, 2) * 2;
      return {aligned(std::min(shape.in, shape.out) * tokens * item),
              aligned(std::max(kSumBytes, 4 * shape.area())) +
                  aligned(std::max(kDepth * shape.block * item, 4 * shape.area()))};
    }
    const bool in_place = pass == kInputGrad && !kPaired<T>;
    return {in_place ? 0 : aligned(values), aligned(4 * kTokens * shape.block)};
  }
  char* part(char* base) const { return base + common + at::get_thread_num() * each; }
  int64_t total() const { return common + at::get_num_threads() * each; }
};

// Runs tasks on all threads; each takes the next one when it is done, so that a core that is slower
// than others, or busy with something else, gets fewer.
template <typename Task>
void run_tasks(int64_t count, const Task& task) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) task(i);
  });
}

// ---- products ----

// Brings a block of columns, whose rows are far from each other, into the second-level cache.
template <typename T>
void prefetch(const T* in, int64_t step, int64_t rows, int64_t block) {
  for (int64_t row = 0; row < rows; ++row, in += step)
    for (int64_t column = 0; column < block; column += kAlignment / sizeof(T))
      __builtin_prefetch(in + column, 0, 2);
}

// out[t, line] = sum of in[t, across(n)] @ packed[n] over the blocks n of each line, + bias
template <typename T>
void multiply(const Index& index, const Shape& shape, const T* in, const T* packed, const T* bias,
              T* out, const Workspace& workspace, char* base) {
  const int64_t block = shape.block, lines = index.start.size() - 1;
  const int64_t in_step = index.side ? shape.out : shape.in;
  const int64_t out_step = index.side ? shape.in : shape.out;
  const int64_t tiles = at::divup(shape.tokens, kTokens);
  // A task is as large as leaves each thread several.
  const int64_t parts =
      std::min(lines, at::divup(kTasks * at::get_num_threads(), std::max<int64_t>(tiles, 1)));
  run_tasks(tiles * parts, [&](int64_t task) {
    auto* sums = reinterpret_cast<float*>(workspace.part(base));
    const int64_t first = task / parts * kTokens, part = task % parts;
    const int64_t rows = std::min(kTokens, shape.tokens - first);
    const T* tile = in + first * in_step;
    for (int64_t line = lines * part / parts; line < lines * (part + 1) / parts; ++line) {
      const int64_t start = index.start[line], stop = index.start[line + 1];
      if (start == stop) std::fill_n(sums, rows * block, 0.0f);
      for (int64_t i = start; i < stop; ++i) {
        const int64_t n = index.order[i];
        if (i + 1 < index.start[lines]) // while this block is multiplied
          prefetch(tile + index.across(index.order[i + 1]) * block, in_step, rows, block);
        brgemm(rows, block, block, in_step, block, block, i > start,
               tile + index.across(n) * block, packed + n * shape.area(), sums, kPaired<T>);
      }
      write_rows(sums, rows, block, bias ? bias + line * block : nullptr,
                 out + first * out_step + line * block, out_step);
    }
    at::native::cpublas::brgemm_release(kPaired<T>);
  });
}

template <typename T>
void forward(const Shape& shape, const T* x, const T* values, const int32_t* blocks, const T* bias,
             T* y, char* base) {
  const auto workspace = Workspace::of<T>(kForward, shape);
  T* packed = reinterpret_cast<T*>(base);
  at::parallel_for(0, shape.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      pack_transposed(values + n * shape.area(), shape.block, packed + n * shape.area());
  });
  const Index rows(blocks, 0, shape.count, shape.out / shape.block);
  multiply(rows, shape, x, packed, bias, y, workspace, base);
}

template <typename T>
void input_grad(const Shape& shape, const T* gy, const T* values, const int32_t* blocks, T* gx,
                char* base) {
  const auto workspace = Workspace::of<T>(kInputGrad, shape);
  const T* packed = values;
  if (workspace.common) {
    T* pairs = reinterpret_cast<T*>(base);
    at::parallel_for(0, shape.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        pack(values + n * shape.area(), shape.block, shape.block, shape.block,
             pairs + n * shape.area());
    });
    packed = pairs;
  }
  const Index columns(blocks, 1, shape.count, shape.in / shape.block);
  multiply(columns, shape, gy, packed, static_cast<const T*>(nullptr), gx, workspace, base);
}

// The kept blocks of gy.T @ x. The narrower of both sides is transposed once for all threads; each
// thread packs the lines of the wider side that it multiplies with it.
template <typename T>
void weight_grad(const Shape& shape, const T* gy, const T* x, const int32_t* blocks, T* grad,
                 char* base) {
  const auto workspace = Workspace::of<T>(kWeightGrad, shape);
  const int64_t block = shape.block, area = shape.area();
  if (!shape.tokens) std::fill_n(grad, shape.count * area, T(0));
  const bool by_row = shape.in <= shape.out; // lines are rows of the weight, x is transposed
  const T *narrow = by_row ? x : gy, *wide = by_row ? gy : x;
  const int64_t narrow_step = by_row ? shape.in : shape.out;
  const int64_t wide_step = by_row ? shape.out : shape.in;
  const int64_t narrow_lines = narrow_step / block, tiles = at::divup(shape.tokens, kDepth);
  const auto rows_of = [&](int64_t tile) {
    return std::min(kDepth, shape.tokens - tile * kDepth);
  };
  const auto depth_of = [&](int64_t tile) {
    return kPaired<T> ? at::divup(rows_of(tile), 2) * 2 : rows_of(tile);
  };
  T* turned = reinterpret_cast<T*>(base);
  const auto turned_at = [&](int64_t tile, int64_t line) {
    return turned + tile * kDepth * narrow_step + line * block * depth_of(tile);
  };
  at::parallel_for(0, tiles * narrow_lines, 1, [&](int64_t begin, int64_t end) {
    auto* pairs = reinterpret_cast<uint32_t*>(workspace.part(base));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t tile = item / narrow_lines, line = item % narrow_lines;
      turn(narrow + tile * kDepth * narrow_step + line * block, narrow_step, rows_of(tile), block,
           turned_at(tile, line), depth_of(tile), pairs);
    }
  });

  const Index index(blocks, by_row ? 0 : 1, shape.count, wide_step / block);
  struct Item { int64_t line, start, stop; };
  std::vector<Item> items;
  const int64_t most = std::max<int64_t>(1, kSumBytes / (4 * area));
  for (int64_t line = 0; line < wide_step / block; ++line)
    for (int64_t i = index.start[line]; i < index.start[line + 1]; i += most)
      items.push_back({line, i, std::min(i + most, index.start[line + 1])});
  run_tasks(shape.tokens ? items.size() : 0, [&](int64_t item) {
    char* part = workspace.part(base);
    auto* sums = reinterpret_cast<float*>(part);
    T* packed = reinterpret_cast<T*>(part + aligned(std::max(kSumBytes, 4 * area)));
    const auto [line, start, stop] = items[item];
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t depth = depth_of(tile);
      pack(wide + tile * kDepth * wide_step + line * block, wide_step, rows_of(tile), block,
           packed);
      for (int64_t i = start; i < stop; ++i)
        brgemm(block, block, depth, depth, block, block, tile > 0,
               turned_at(tile, index.across(index.order[i])), packed, sums + (i - start) * area,
               kPaired<T>);
    }
    for (int64_t i = start; i < stop; ++i) {
      float* sum = sums + (i - start) * area;
      if (by_row) { // sums are [input, output]
        auto* out = reinterpret_cast<uint32_t*>(packed);
        transpose(reinterpret_cast<uint32_t*>(sum), block, block, block, out, block);
        std::memcpy(sum, out, 4 * area);
      }
      round_row(sum, area, grad + index.order[i] * area);
    }
    at::native::cpublas::brgemm_release(kPaired<T>);
  });
}

template <typename T>
void run(Pass pass, const Shape& shape, const void* a, const void* b, const int32_t* blocks,
         const void* bias, void* out, char* workspace) {
  const T *left = static_cast<const T*>(a), *right = static_cast<const T*>(b);
  T* result = static_cast<T*>(out);
  if (pass == kForward)
    forward(shape, left, right, blocks, static_cast<const T*>(bias), result, workspace);
  else if (pass == kInputGrad)
    input_grad(shape, left, right, blocks, result, workspace);
  else
    weight_grad(shape, left, right, blocks, result, workspace);
}

} // namespace

// Types of numbers are named by their bytes: 4 for float32, 2 for bfloat16.
extern "C" {

int64_t windlass_block_workspace(int64_t pass, int64_t itemsize, const Shape* shape) {
  const auto workspace = itemsize == 2 ? Workspace::of<BFloat16>(Pass(pass), *shape)
                                       : Workspace::of<float>(Pass(pass), *shape);
  return workspace.total();
}

// Computes `x @ W.T + bias` of (x, values), `gy @ W` of (gy, values), or the kept blocks of
// `gy.T @ x` of (gy, x).
int64_t windlass_block_product(int64_t pass, int64_t itemsize, const Shape* shape, const void* a,
                               const void* b, const int32_t* blocks, const void* bias, void* out,
                               char* workspace) {
  if (!are_inside(blocks, *shape)) return kBadBlock;
  try {
    if (itemsize == 2)
      run<BFloat16>(Pass(pass), *shape, a, b, blocks, bias, out, workspace);
    else
      run<float>(Pass(pass), *shape, a, b, blocks, bias, out, workspace);
  } catch (...) { // numbers that these kernels do not take on this processor
    return kFailed;
  }
  return kDone;
}
}
