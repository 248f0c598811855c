// GEMM, GELU and GEMM in float32 on kept blocks of weights, op by op or a tile of tokens at a time.
// Its loops move each operand once if the last-level cache holds the weights and a few tiles.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

constexpr int kBlock = 16, kTile = 64;

struct Linear {
  int in, out, kept;           // kept: blocks in each block row
  float* values;               // [block row, kept block, input, output]
  std::vector<int> columns;    // [block row, kept block]
  float* bias;
};

// Lines of 64 bytes: an access that crosses two of them counts as one miss at most.
static float* fresh(size_t count) {
  return static_cast<float*>(std::aligned_alloc(64, (sizeof(float) * count + 63) / 64 * 64));
}

static float* filled(size_t count, float value) {
  float* all = fresh(count);
  std::fill(all, all + count, value);
  return all;
}

static Linear make(int in, int out, int kept) {
  const int rows = out / kBlock, cols = in / kBlock;
  Linear w{in, out, kept, filled(size_t(rows) * kept * kBlock * kBlock, 0.01f),
           std::vector<int>(size_t(rows) * kept), filled(out, 0.1f)};
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < kept; ++i) w.columns[row * kept + i] = (row + i * (cols / kept)) % cols;
  return w;
}

extern "C" __attribute__((noinline)) void counted_linear(const Linear& w, const float* x,
                                                         float* y, int tokens) {
  for (int row = 0; row < w.out / kBlock; ++row) {
    for (int token = 0; token < tokens; ++token) {
      float sum[kBlock];
      for (int o = 0; o < kBlock; ++o) sum[o] = w.bias[row * kBlock + o];
      for (int i = 0; i < w.kept; ++i) {
        const size_t at = size_t(row) * w.kept + i;
        const float* block = &w.values[at * kBlock * kBlock];
        const float* input = x + size_t(token) * w.in + w.columns[at] * kBlock;
        for (int k = 0; k < kBlock; ++k)
          for (int o = 0; o < kBlock; ++o) sum[o] += input[k] * block[k * kBlock + o];
      }
      for (int o = 0; o < kBlock; ++o) y[size_t(token) * w.out + row * kBlock + o] = sum[o];
    }
  }
}

extern "C" __attribute__((noinline)) void counted_gelu(const float* y, float* g, size_t count) {
  for (size_t i = 0; i < count; ++i)
    g[i] = 0.5f * y[i] * (1.0f + std::tanh(0.79788456f * (y[i] + 0.044715f * y[i] * y[i] * y[i])));
}

int main(int argc, char** argv) {
  const std::string mode = argv[1];
  const int tokens = std::atoi(argv[2]), width = std::atoi(argv[3]), ffn = std::atoi(argv[4]);
  const int parts = std::atoi(argv[5]);  // one block in `parts` is kept
  const Linear up = make(width, ffn, width / kBlock / parts);
  const Linear down = make(ffn, width, ffn / kBlock / parts);
  const float* x = filled(size_t(tokens) * width, 0.5f);
  // Not touched before: a result's first store misses, as the report counts it.
  float* y = fresh(size_t(tokens) * ffn);
  float* g = fresh(size_t(tokens) * ffn);
  float* z = fresh(size_t(tokens) * width);
  std::vector<float> flush(1 << 24);  // 64 MiB, so that nothing of the above is in the cache
  for (size_t i = 0; i < flush.size(); i += 16) flush[i] += 1.0f;
  for (int first = 0; first < tokens; first += kTile) {
    const size_t in = size_t(first) * width, mid = size_t(first) * ffn;
    if (mode == "dataflow") {
      counted_linear(up, &x[in], y, kTile);
      counted_gelu(y, y, size_t(kTile) * ffn);
      counted_linear(down, y, z + in, kTile);
    } else if (mode == "epilogue") {
      counted_linear(up, &x[in], y, kTile);
      counted_gelu(y, g + mid, size_t(kTile) * ffn);
    } else {
      counted_linear(up, &x[in], y + mid, kTile);
    }
  }
  if (mode == "kernel by kernel") counted_gelu(y, g, size_t(tokens) * ffn);
  if (mode != "dataflow")
    for (int first = 0; first < tokens; first += kTile)
      counted_linear(down, g + size_t(first) * ffn, z + size_t(first) * width, kTile);
  std::printf("%f %f\n", z[0], flush[0]);
}
