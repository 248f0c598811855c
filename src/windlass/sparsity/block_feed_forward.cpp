// The feed-forward of two weights of kept blocks with a GELU between them, tile by tile of tokens:
// what lies between both products is in the cache when it is read, and no activation is written
// but what the backward pass needs. Results do not depend on the number of threads.

#include "block_linear.cpp"

namespace {
namespace feed_forward { // names of its own, whatever those of the included file are

constexpr int64_t kTileTokens = 128; // of one tile, whose inner features stay in the cache

typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
constexpr int64_t kLanes = 16, kMostLanes = 8; // of a vector, and vectors of a row of a block

// ---- GELU ----

// e^x for x <= 0. Source: Moshier, Cephes, `expf`.
inline Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
  const Floats shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

struct Gelu {
  Floats value, slope;
};

inline Floats magnitude(Floats x) { return x < 0.0f ? -x : x; }

// `x P(x)` with the normal distribution P. Source of its error function, good to 1.5e-7:
// Abramowitz and Stegun 1964, 7.1.26.
inline Gelu gelu(Floats x) {
  const Floats t = 1.0f / (magnitude(x) * (0.3275911f * 0.70710678f) + 1.0f);
  const Floats e = exponential(x * x * -0.5f);
  Floats p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats half = p * t * e * 0.5f;
  const Floats share = x < 0.0f ? half : 1.0f - half;
  return {x * share, share + x * e * 0.39894228f};
}

// The same with `P(x) = (1 + tanh(u)) / 2`. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
inline Gelu gelu_tanh(Floats x) {
  const Floats square = x * x, u = x * (square * (0.044715f * 0.79788456f) + 0.79788456f);
  const Floats e = exponential(magnitude(u) * -2.0f);
  const Floats small = e / (e + 1.0f); // 1 - P for u > 0
  const Floats share = u < 0.0f ? small : 1.0f - small;
  const Floats inner = square * (3 * 0.044715f * 0.79788456f) + 0.79788456f;
  return {x * share, share + x * share * (1.0f - share) * inner * 2.0f};
}

template <bool Tanh>
inline Gelu activation(Floats x) {
  if constexpr (Tanh)
    return gelu_tanh(x);
  else
    return gelu(x);
}

inline Floats load(const float* in) {
  Floats out;
  std::memcpy(&out, in, sizeof(out));
  return out;
}
inline void store(float* out, Floats value) { std::memcpy(out, &value, sizeof(value)); }

typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));
inline Floats load(const BFloat16* in) {
  Halves halves;
  std::memcpy(&halves, in, sizeof(halves));
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}
inline void store(BFloat16* out, Floats value) {
  const Words bits = (Words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words safe = value == value ? rounded : Words{} + 0x7fc0;
  const Halves halves = __builtin_convertvector(safe, Halves);
  std::memcpy(out, &halves, sizeof(halves));
}

// ---- sizes ----

struct Sizes {
  int64_t tokens, width, inner, up_count, down_count, block, tanh;
  int64_t area() const { return block * block; }
  int64_t lines() const { return inner / block; }
  int64_t tiles() const { return at::divup(tokens, kTileTokens); }
  int64_t rows(int64_t tile) const { return std::min(kTileTokens, tokens - tile * kTileTokens); }
  // inner features of a tile: [line][token][feature of the line]
  int64_t tile_at(int64_t tile) const { return tile * kTileTokens * inner; }
};

template <typename T>
struct Pointers {
  const T *x, *gy, *up, *down, *up_bias, *down_bias;
  const int32_t *up_blocks, *down_blocks;
  T *hidden, *y, *gx, *up_grad, *down_grad;
  float* up_bias_grad;
};

int64_t depth_of(int64_t tokens) { return at::divup(tokens, 2) * 2; }

template <typename T>
struct Memory {
  int64_t packed, turned, wide, each; // bytes: of all threads, and of each thread

  explicit Memory(const Sizes& s, bool backward) {
    const int64_t item = sizeof(T), tile = kTileTokens * s.inner * item;
    packed = aligned((s.up_count + s.down_count) * s.area() * item);
    turned = backward ? 2 * aligned(s.width * depth_of(s.tokens) * item) : 0;
    // both wide sides of the weights' gradients, as brgemm reads them
    wide = backward ? 2 * aligned(s.inner * depth_of(s.tokens) * item) : 0;
    const int64_t sums = aligned(4 * kTileTokens * s.block);
    each = sums + aligned(tile);
    if (backward)
      each = std::max(each, aligned(std::max(kSumBytes, 4 * s.area())) + aligned(8 * s.area()) +
                                aligned(kDepth * s.block * item));
  }
  int64_t total() const {
    return packed + turned + wide + at::get_num_threads() * each;
  }
  char* part(char* base) const {
    return base + packed + turned + wide + at::get_thread_num() * each;
  }
};

// ---- the forward pass ----

template <typename T>
void pack_all(const T* values, int64_t count, int64_t block, bool transposed, T* out) {
  const int64_t area = block * block;
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      if (transposed)
        pack_transposed(values + n * area, block, out + n * area);
      else
        pack(values + n * area, block, block, block, out + n * area);
  });
}

// sums = sum of in[across(n)] @ packed[n] over the blocks of a line; `in` gives each line's rows
template <typename T, typename In>
void sum_line(const Index& index, int64_t line, int64_t rows, int64_t block, int64_t in_step,
              const T* packed, float* sums, In in) {
  const int64_t start = index.start[line], stop = index.start[line + 1];
  if (start == stop) std::fill_n(sums, rows * block, 0.0f);
  for (int64_t i = start; i < stop; ++i) {
    const int64_t n = index.order[i];
    brgemm(rows, block, block, in_step, block, block, i > start, in(index.across(n)),
           packed + n * block * block, sums, kPaired<T>);
  }
}

template <bool Tanh, typename T>
void activate(const float* sums, int64_t rows, int64_t block, const T* bias, T* hidden, T* out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < block; column += kLanes) {
      const int64_t at = row * block + column;
      Floats h = load(sums + at);
      if (bias) h += load(bias + column);
      T* kept = hidden ? hidden + at : out + at;
      store(kept, h);
      store(out + at, activation<Tanh>(load(kept)).value); // as the backward pass reads it
    }
}

template <bool Tanh, typename T>
void forward_section(const Sizes& s, const Pointers<T>& p, char* base) {
  const Memory<T> memory(s, false);
  const int64_t block = s.block, area = s.area();
  T* up = reinterpret_cast<T*>(base);
  T* down = up + s.up_count * area;
  pack_all(p.up, s.up_count, block, true, up);
  pack_all(p.down, s.down_count, block, true, down);
  const Index up_rows(p.up_blocks, 0, s.up_count, s.lines());
  const Index down_rows(p.down_blocks, 0, s.down_count, s.width / block);
  at::parallel_for(0, s.tiles(), 1, [&](int64_t begin, int64_t end) {
    auto* sums = reinterpret_cast<float*>(memory.part(base));
    T* inner = reinterpret_cast<T*>(memory.part(base) + aligned(4 * kTileTokens * block));
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t rows = s.rows(tile), first = tile * kTileTokens * s.width;
      for (int64_t line = 0; line < s.lines(); ++line) {
        sum_line(up_rows, line, rows, block, s.width, up, sums,
                 [&](int64_t from) { return p.x + first + from * block; });
        const int64_t at = line * rows * block;
        activate<Tanh>(sums, rows, block, p.up_bias ? p.up_bias + line * block : nullptr,
                       p.hidden ? p.hidden + s.tile_at(tile) + at : nullptr, inner + at);
      }
      for (int64_t line = 0; line < s.width / block; ++line) {
        sum_line(down_rows, line, rows, block, block, down, sums,
                 [&](int64_t from) { return inner + from * rows * block; });
        write_rows(sums, rows, block, p.down_bias ? p.down_bias + line * block : nullptr,
                   p.y + first + line * block, s.width);
      }
    }
    at::native::cpublas::brgemm_release(kPaired<T>);
  });
}

// ---- the backward pass ----

// Writes rows of a line as the right-hand matrix of a product that sums over all tokens.
inline void write_wide(const float* in, int64_t rows, int64_t block, float* out, int64_t first) {
  std::copy_n(in, rows * block, out + first * block);
}
inline void write_wide(const BFloat16* in, int64_t rows, int64_t block, BFloat16* out,
                       int64_t first) {
  pack(in, block, rows, block, out + first * block);
}

// by_hidden = sums * slope, and inner = value, of the GELU at the hidden features; and the columns'
// sums of by_hidden
template <bool Tanh, typename T>
void deactivate(const float* sums, int64_t rows, int64_t block, const T* hidden, T* by_hidden,
                T* inner, float* totals) {
  const int64_t lanes = block / kLanes;
  Floats columns[kMostLanes] = {};
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t at = row * block + lane * kLanes;
      const Gelu gelu = activation<Tanh>(load(hidden + at));
      const Floats gradient = load(sums + at) * gelu.slope;
      columns[lane] += gradient;
      store(by_hidden + at, gradient);
      store(inner + at, gelu.value);
    }
  for (int64_t lane = 0; lane < lanes; ++lane) store(totals + lane * kLanes, columns[lane]);
}

// The kept blocks of the gradient of one weight. `turned` is the transposed narrow side,
// `wide` the other one as brgemm reads it; `flips` if lines of the wide side are rows.
template <typename T>
void kept_gradient(const Sizes& s, const int32_t* blocks, int64_t count, bool flips,
                   const T* turned, const T* wide, T* grad, const Memory<T>& memory, char* base) {
  const int64_t block = s.block, area = s.area(), tokens = depth_of(s.tokens);
  const Index index(blocks, flips ? 0 : 1, count, s.lines());
  const int64_t most = std::max<int64_t>(1, kSumBytes / (4 * area));
  at::parallel_for(0, s.lines(), 1, [&](int64_t begin, int64_t end) {
    char* part = memory.part(base);
    auto* sums = reinterpret_cast<float*>(part);
    auto* spare = reinterpret_cast<uint32_t*>(part + aligned(std::max(kSumBytes, 4 * area)));
    for (int64_t line = begin; line < end; ++line)
      for (int64_t start = index.start[line]; start < index.start[line + 1]; start += most) {
        const int64_t stop = std::min(start + most, index.start[line + 1]);
        for (int64_t first = 0; first < tokens; first += kDepth) {
          const int64_t depth = std::min(kDepth, tokens - first);
          for (int64_t i = start; i < stop; ++i)
            brgemm(block, block, depth, depth, block, block, first > 0,
                   turned + first * s.width + index.across(index.order[i]) * block * depth,
                   wide + (line * tokens + first) * block, sums + (i - start) * area, kPaired<T>);
        }
        for (int64_t i = start; i < stop; ++i) {
          float* sum = sums + (i - start) * area;
          if (flips) {
            transpose(reinterpret_cast<uint32_t*>(sum), block, block, block, spare, block);
            std::memcpy(sum, spare, 4 * area);
          }
          round_row(sum, area, grad + index.order[i] * area);
        }
      }
    at::native::cpublas::brgemm_release(kPaired<T>);
  });
}

// The transposed `[tokens, width]`: for `kDepth` tokens at a time, line by line.
template <typename T>
void turn_all(const Sizes& s, const T* in, T* out, const Memory<T>& memory, char* base) {
  const int64_t lines = s.width / s.block, chunks = at::divup(s.tokens, kDepth);
  at::parallel_for(0, chunks * lines, 1, [&](int64_t begin, int64_t end) {
    auto* pairs = reinterpret_cast<uint32_t*>(memory.part(base));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / lines * kDepth, line = item % lines;
      const int64_t rows = std::min(kDepth, s.tokens - first), depth = depth_of(rows);
      T* to = out + first * s.width + line * s.block * depth;
      if (depth > rows) std::fill_n(to, s.block * depth, T(0));
      turn(in + first * s.width + line * s.block, s.width, rows, s.block, to, depth, pairs);
    }
  });
}

template <bool Tanh, typename T>
void backward_section(const Sizes& s, const Pointers<T>& p, char* base) {
  const Memory<T> memory(s, true);
  const int64_t block = s.block, area = s.area(), tokens = depth_of(s.tokens);
  T* up = reinterpret_cast<T*>(base);
  T* down = up + s.up_count * area;
  pack_all(p.up, s.up_count, block, false, up);
  pack_all(p.down, s.down_count, block, false, down);
  T* turned_x = reinterpret_cast<T*>(base + memory.packed);
  T* turned_gy = reinterpret_cast<T*>(base + memory.packed + memory.turned / 2);
  T* wide_hidden = reinterpret_cast<T*>(base + memory.packed + memory.turned);
  T* wide_inner = reinterpret_cast<T*>(base + memory.packed + memory.turned + memory.wide / 2);
  if (tokens > s.tokens) // an odd last row is followed by zeros
    for (T* wide : {wide_hidden, wide_inner})
      for (int64_t line = 0; line < s.lines(); ++line)
        std::fill_n(wide + (line * tokens + tokens - 2) * block, 2 * block, T(0));
  turn_all(s, p.x, turned_x, memory, base);
  turn_all(s, p.gy, turned_gy, memory, base);
  std::vector<float> totals(s.tiles() * s.inner); // of each tile, in whatever thread
  const Index down_columns(p.down_blocks, 1, s.down_count, s.lines());
  const Index up_columns(p.up_blocks, 1, s.up_count, s.width / block);
  at::parallel_for(0, s.tiles(), 1, [&](int64_t begin, int64_t end) {
    auto* sums = reinterpret_cast<float*>(memory.part(base));
    T* by_hidden = reinterpret_cast<T*>(memory.part(base) + aligned(4 * kTileTokens * block));
    std::vector<T> line_inner(kTileTokens * block);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t rows = s.rows(tile), token = tile * kTileTokens, first = token * s.width;
      for (int64_t line = 0; line < s.lines(); ++line) {
        sum_line(down_columns, line, rows, block, s.width, down, sums,
                 [&](int64_t from) { return p.gy + first + from * block; });
        const int64_t at = line * rows * block;
        deactivate<Tanh>(sums, rows, block, p.hidden + s.tile_at(tile) + at, by_hidden + at,
                         line_inner.data(), totals.data() + tile * s.inner + line * block);
        write_wide(by_hidden + at, rows, block, wide_hidden + line * tokens * block, token);
        write_wide(line_inner.data(), rows, block, wide_inner + line * tokens * block, token);
      }
      for (int64_t line = 0; line < s.width / block; ++line) {
        sum_line(up_columns, line, rows, block, block, up, sums,
                 [&](int64_t from) { return by_hidden + from * rows * block; });
        write_rows(sums, rows, block, static_cast<const T*>(nullptr), p.gx + first + line * block,
                   s.width);
      }
    }
    at::native::cpublas::brgemm_release(kPaired<T>);
  });
  kept_gradient(s, p.up_blocks, s.up_count, true, turned_x, wide_hidden, p.up_grad, memory, base);
  kept_gradient(s, p.down_blocks, s.down_count, false, turned_gy, wide_inner, p.down_grad, memory,
                base);
  std::fill_n(p.up_bias_grad, s.inner, 0.0f);
  for (int64_t at = 0; at < s.tiles() * s.inner; ++at) p.up_bias_grad[at % s.inner] += totals[at];
}

template <typename T>
void section(const Sizes& s, const Pointers<T>& p, bool backward, char* base) {
  if (backward)
    s.tanh ? backward_section<true>(s, p, base) : backward_section<false>(s, p, base);
  else
    s.tanh ? forward_section<true>(s, p, base) : forward_section<false>(s, p, base);
}

} // namespace feed_forward
} // namespace

using feed_forward::Memory;
using feed_forward::Pointers;
using feed_forward::Sizes;

// Types of numbers are named by their bytes: 4 for float32, 2 for bfloat16.
extern "C" {

int64_t windlass_feed_forward_workspace(int64_t itemsize, int64_t backward, const Sizes* sizes) {
  return itemsize == 2 ? Memory<BFloat16>(*sizes, backward).total()
                       : Memory<float>(*sizes, backward).total();
}

int64_t windlass_feed_forward(int64_t itemsize, int64_t backward, const Sizes* sizes,
                              const void* pointers, char* workspace) {
  const auto& s = *sizes;
  if (!are_inside(static_cast<const Pointers<float>*>(pointers)->up_blocks,
                  {s.tokens, s.width, s.inner, s.up_count, s.block}) ||
      !are_inside(static_cast<const Pointers<float>*>(pointers)->down_blocks,
                  {s.tokens, s.inner, s.width, s.down_count, s.block}))
    return kBadBlock;
  try {
    if (itemsize == 2)
      feed_forward::section(s, *static_cast<const Pointers<BFloat16>*>(pointers), backward, workspace);
    else
      feed_forward::section(s, *static_cast<const Pointers<float>*>(pointers), backward, workspace);
  } catch (...) { // numbers that these kernels do not take on this processor
    return kFailed;
  }
  return kDone;
}
}
