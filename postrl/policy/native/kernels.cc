// CPU kernels of the policy's forward, called by XLA; __init__.py beside this file builds, registers and wraps them.
//
// Each number is computed by the same operations in the same order whatever else is in the call: a row of a linear map from
// its own row of x, a token's attention from its own keys in order. So a token's log-probability has the same bits in a
// prompt, in a decode step and in training, in any batch, from any pages; the code that XLA picks depends on the shapes.
// Weights are read in place from the stack of all layers, keys and values from their pages: nothing is gathered first.
//
// Shapes: T tokens, D model, H query heads, G kv heads, M = H/G, K head dim, N outputs, L layers, V vocab, P pages of 16.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using F32Out = ffi::Result<F32>;

namespace {

// ---------------------------------------------------------------------------------------------------------- vectors of 16

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(4), may_alias));

constexpr int kLanes = 16;
constexpr float kInf = std::numeric_limits<float>::infinity();

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }

// The first n < 16 lanes; the others hold `fill`.
inline Vec load_part(const float* p, int64_t n, float fill = 0.0f) {
  Vec v = Vec{} + fill;
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}

inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

// Lanes of a and b by number, b's from 16 on.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// The sums of sixteen vectors, by the same tree for each of them.
inline Vec sums(const Vec* v) {
  Vec pairs[8], fours[4], halves[2];
  for (int i = 0; i < 8; ++i) {
    const Vec a = v[2 * i], b = v[2 * i + 1];
    pairs[i] = SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
               SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const Vec a = pairs[2 * i], b = pairs[2 * i + 1];
    fours[i] = SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  const auto fold = [](Vec a, Vec b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  for (int i = 0; i < 2; ++i) halves[i] = fold(fours[2 * i], fours[2 * i + 1]);
  return fold(halves[0], halves[1]);
}

inline float sum(Vec v) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half h[2];
  std::memcpy(h, &v, sizeof v);
  const Half s = h[0] + h[1];
  Quarter q[2];
  std::memcpy(q, &s, sizeof s);
  const Quarter r = q[0] + q[1];
  return (r[0] + r[2]) + (r[1] + r[3]);
}

inline float max(Vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// e^x, 0 below -87 and no more than e^88, which is finite. Range reduction and polynomial: Cephes, expf.
inline Vec exp(Vec x) {
  const Vec magic = Vec{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  const Vec limited = x > 88.0f ? Vec{} + 88.0f : x;
  const Vec clamped = max(limited, Vec{} - 87.0f);
  const Vec shifted = clamped * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < -87.0f ? Vec{} : p * scale;
}

// ---------------------------------------------------------------------------------------------------------------- threads

// f(0) ... f(num - 1), on the calling thread and those of XLA's pool that come in time. The caller waits only for calls that
// have begun: a helper that starts late finds nothing to do, so that two kernels that run at once can't wait for each other.
template <class F>
void parallel(ffi::ThreadPool& pool, int64_t num, const F& f) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t num_helpers = std::min(pool.num_threads(), num) - 1;
  if (num_helpers <= 0) {
    for (int64_t i = 0; i < num; ++i) f(i);
    return;
  }
  auto state = std::make_shared<State>();
  auto work = [state, f, num] {
    for (int64_t i; (i = state->next.fetch_add(1)) < num;) {
      f(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < num; ++spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (spins > 4096) std::this_thread::yield();  // the other thread may have lost its core to a sandbox
  }
}

// ------------------------------------------------------------------------------------------------------------ linear maps

constexpr int kTile = 4;            // rows and outputs of a tile: 16 sums stay in registers
constexpr int64_t kBlockRows = 96;  // rows of x that are used again from the second-level cache
constexpr int64_t kBlockCols = 32;  // outputs of one unit of work

struct LinearMap {
  const float* x;     // [T, K]
  const float* w;     // [N, K]
  const float* base;  // [T, N] or null: y = base + scale * x @ w.T
  float scale;
  float* y;  // [T, N]
  int64_t T, K, N;
};

// R rows from t on times C outputs from n on. `ahead` is a row of weights that will be needed next, or null.
template <int R, int C>
inline void linear_tile(const LinearMap& map, int64_t t, int64_t n, const float* ahead) {
  const int64_t K = map.K;
  const float *x = map.x + t * K, *w = map.w + n * K;
  Vec acc[kTile * kTile] = {};
  const auto step = [&](auto at) {
    Vec wv[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) wv[c] = at(w + c * K);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec xv = at(x + r * K);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r * kTile + c] += xv * wv[c];
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= K; k += kLanes) {
    step([k](const float* p) { return load(p + k); });
    if (ahead) __builtin_prefetch(ahead + k, 0, 2);
  }
  if (k < K) step([k, K](const float* p) { return load_part(p + k, K - k); });
  const Vec dots = sums(acc);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      const int64_t i = (t + r) * map.N + n + c;
      const float dot = dots[r * kTile + c];
      map.y[i] = map.base ? map.base[i] + map.scale * dot : dot;
    }
  }
}

template <int C>
inline void linear_rows(const LinearMap& map, int64_t first, int64_t last, int64_t n) {
  int64_t t = first, next = n + C;
  const int64_t end = std::min(map.N, next + kTile);
  const auto ahead = [&] { return next < end ? map.w + map.K * next++ : nullptr; };
  for (; t + kTile <= last; t += kTile) linear_tile<kTile, C>(map, t, n, ahead());
  switch (last - t) {
    case 3: return linear_tile<3, C>(map, t, n, ahead());
    case 2: return linear_tile<2, C>(map, t, n, ahead());
    case 1: return linear_tile<1, C>(map, t, n, ahead());
  }
}

void run_linear(ffi::ThreadPool& pool, const LinearMap& map) {
  const auto block = [map](int64_t i) {
    const int64_t begin = i * kBlockCols, end = std::min(map.N, begin + kBlockCols);
    for (int64_t first = 0; first < map.T; first += kBlockRows) {
      const int64_t last = std::min(map.T, first + kBlockRows);
      int64_t n = begin;
      for (; n + kTile <= end; n += kTile) linear_rows<kTile>(map, first, last, n);
      for (; n < end; ++n) linear_rows<1>(map, first, last, n);
    }
  };
  const int64_t num = (map.N + kBlockCols - 1) / kBlockCols;
  if (map.T * map.N * map.K < 100'000) {  // a microsecond's work: no other thread would come in time
    for (int64_t i = 0; i < num; ++i) block(i);
  } else {
    parallel(pool, num, block);
  }
}

// How many of T rows are real; the others are padding, whose results are 0.
int64_t num_real(const S32& count, int64_t T) { return std::clamp<int64_t>(count.typed_data()[0], 0, T); }

void clear_padding(F32Out& y, int64_t first) {
  const int64_t width = y->element_count() / std::max<int64_t>(1, y->dimensions()[0]);
  std::memset(y->typed_data() + first * width, 0, (y->element_count() - first * width) * sizeof(float));
}

// Element `index` of an array of L layers. XLA's slice of the stack would be a copy.
const float* layer_of(const F32& stack, const S32& index) {
  const auto dims = stack.dimensions();
  int64_t size = 1;
  for (size_t i = 1; i < dims.size(); ++i) size *= dims[i];
  return stack.typed_data() + index.typed_data()[0] * size;
}

ffi::Error Linear(ffi::ThreadPool pool, F32 x, F32 w, S32 layer, S32 count, F32Out y) {
  const int64_t T = num_real(count, x.dimensions()[0]);
  run_linear(pool, {x.typed_data(), layer_of(w, layer), nullptr, 1.0f, y->typed_data(), T, x.dimensions()[1],
                    w.dimensions()[1]});
  clear_padding(y, T);
  return ffi::Error::Success();
}

ffi::Error LinearAdd(ffi::ThreadPool pool, F32 base, F32 x, F32 w, S32 layer, S32 count, float scale, F32Out y) {
  const int64_t T = num_real(count, x.dimensions()[0]);
  run_linear(pool, {x.typed_data(), layer_of(w, layer), base.typed_data(), scale, y->typed_data(), T,
                    x.dimensions()[1], w.dimensions()[1]});
  clear_padding(y, T);
  return ffi::Error::Success();
}

// ------------------------------------------------------------------------------------------------ norm, activation, softmax

ffi::Error RmsNorm(F32 x, F32 weight, S32 layer, S32 count, float eps, F32Out y) {
  const int64_t T = num_real(count, x.dimensions()[0]), D = x.dimensions()[1];
  const float* w = layer_of(weight, layer);
  for (int64_t t = 0; t < T; ++t) {
    const float* row = x.typed_data() + t * D;
    float* out = y->typed_data() + t * D;
    Vec squares = {};
    int64_t d = 0;
    for (; d + kLanes <= D; d += kLanes) squares += load(row + d) * load(row + d);
    if (d < D) squares += load_part(row + d, D - d) * load_part(row + d, D - d);
    const float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(D) + eps);
    for (d = 0; d < D; ++d) out[d] = row[d] * inverse * w[d];
  }
  clear_padding(y, T);
  return ffi::Error::Success();
}

// 0 below -88, where it is less than any activation feels.
inline Vec silu(Vec x) { return x < -88.0f ? Vec{} : x / (exp(-x) + 1.0f); }

ffi::Error SwiGlu(ffi::ThreadPool pool, F32 gate, F32 up, S32 count, F32Out y) {
  const int64_t T = num_real(count, gate.dimensions()[0]), size = T * gate.dimensions()[1], block = 1 << 14;
  const float *g = gate.typed_data(), *u = up.typed_data();
  float* out = y->typed_data();
  parallel(pool, (size + block - 1) / block, [=](int64_t i) {
    const int64_t end = std::min(size, (i + 1) * block);
    int64_t k = i * block;
    for (; k + kLanes <= end; k += kLanes) store(out + k, silu(load(g + k)) * load(u + k));
    if (k < end) {
      const Vec last = silu(load_part(g + k, end - k)) * load_part(u + k, end - k);
      std::memcpy(out + k, &last, (end - k) * sizeof(float));
    }
  });
  clear_padding(y, T);
  return ffi::Error::Success();
}

// What the softmax of a row of logits divides by, kept as a logarithm. Not inlined: the sampler and the learner must run the
// same instructions.
struct Normalizer {
  float top, log_total;
};

__attribute__((noinline)) Normalizer normalizer(const float* row, int64_t V, float inverse_temperature) {
  const int64_t whole = V / kLanes * kLanes;
  const Vec rest = load_part(row + whole, V - whole, -kInf) * inverse_temperature;
  Vec largest = rest;
  for (int64_t v = 0; v < whole; v += kLanes) largest = max(largest, load(row + v) * inverse_temperature);
  const float top = max(largest);
  Vec total = exp(rest - top);
  for (int64_t v = 0; v < whole; v += kLanes) total += exp(load(row + v) * inverse_temperature - top);
  return {top, std::log(sum(total))};
}

__attribute__((noinline)) float token_logprob(float logit, float inverse_temperature, Normalizer z) {
  return (logit * inverse_temperature - z.top) - z.log_total;
}

// Of the target of each row, and log(sum(exp(x / temperature))).
ffi::Error LogProbability(ffi::ThreadPool pool, F32 logits, F32 inverse_temperature, S32 target, F32Out logprob, F32Out logz) {
  const int64_t R = logits.dimensions()[0], V = logits.dimensions()[1];
  const float *data = logits.typed_data(), *inverse = inverse_temperature.typed_data();
  const int32_t* targets = target.typed_data();
  float *out = logprob->typed_data(), *zs = logz->typed_data();
  parallel(pool, R, [=](int64_t r) {
    const Normalizer z = normalizer(data + r * V, V, inverse[r]);
    const int64_t at = std::clamp<int64_t>(targets[r], 0, V - 1);
    out[r] = token_logprob(data[r * V + at], inverse[r], z);
    zs[r] = z.top + z.log_total;
  });
  return ffi::Error::Success();
}

// The token at which the cumulative probability passes u in [0, 1); the largest logit where u is negative (greedy).
int32_t pick(const float* row, int64_t V, float inverse_temperature, float u, float top) {
  if (u < 0.0f) return static_cast<int32_t>(std::max_element(row, row + V) - row);
  constexpr int64_t kBlock = 128;
  thread_local std::vector<double> before;
  before.assign(1, 0.0);
  const auto weight = [&](int64_t v) {
    const int64_t n = std::min<int64_t>(kLanes, V - v);
    return exp((n == kLanes ? load(row + v) : load_part(row + v, n, -kInf)) * inverse_temperature - top);
  };
  for (int64_t v = 0; v < V; v += kBlock) {
    Vec block = {};
    for (int64_t i = v; i < std::min(V, v + kBlock); i += kLanes) block += weight(i);
    before.push_back(before.back() + sum(block));
  }
  // Rounding may leave a target at the very end of a block uncovered: then the heaviest token, never one of weight 0.
  const double target = u * before.back();
  const int64_t first = (std::upper_bound(before.begin(), before.end(), target) - before.begin() - 1) * kBlock;
  double sum_before = before[std::min<int64_t>(first / kBlock, before.size() - 1)];
  for (int64_t v = first; v < std::min(V, first + kBlock); v += kLanes) {
    const Vec w = weight(v);
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, V - v); ++i) {
      sum_before += w[i];
      if (w[i] > 0.0f && sum_before > target) return static_cast<int32_t>(v + i);
    }
  }
  return static_cast<int32_t>(std::max_element(row, row + V) - row);
}

// A token of each of the first `count` rows, and its log-probability.
ffi::Error Sample(ffi::ThreadPool pool, F32 logits, F32 inverse_temperature, F32 uniform, S32 count, ffi::Result<S32> token,
                  F32Out logprob) {
  const int64_t R = logits.dimensions()[0], V = logits.dimensions()[1], num = num_real(count, R);
  const float *data = logits.typed_data(), *inverse = inverse_temperature.typed_data(), *us = uniform.typed_data();
  int32_t* tokens = token->typed_data();
  float* out = logprob->typed_data();
  parallel(pool, num, [=](int64_t r) {
    const float* row = data + r * V;
    const Normalizer z = normalizer(row, V, inverse[r]);
    tokens[r] = pick(row, V, inverse[r], us[r], z.top);
    out[r] = token_logprob(row[tokens[r]], inverse[r], z);
  });
  std::fill(tokens + num, tokens + R, 0);
  std::fill(out + num, out + R, 0.0f);
  return ffi::Error::Success();
}

// -------------------------------------------------------------------------------------------------------------- attention

// Cosines and sines of rotary positions, [T, K/2] each.
ffi::Error RopeAngles(S32 position, float theta, F32Out cosine, F32Out sine) {
  const int64_t T = position.dimensions()[0], half = cosine->dimensions()[1];
  for (int64_t i = 0; i < half; ++i) {
    const double frequency = std::pow(static_cast<double>(theta), -static_cast<double>(i) / half);
    for (int64_t t = 0; t < T; ++t) {
      const double angle = position.typed_data()[t] * frequency;
      cosine->typed_data()[t * half + i] = static_cast<float>(std::cos(angle));
      sine->typed_data()[t * half + i] = static_cast<float>(std::sin(angle));
    }
  }
  return ffi::Error::Success();
}

struct Heads {
  int64_t G, M, K;
  int64_t padded() const { return (K + kLanes - 1) / kLanes * kLanes; }  // of a row of values
};

// y[k * stride] = the rotated x.
inline void rotate(const float* x, const float* cosine, const float* sine, int64_t K, float* y, int64_t stride) {
  const int64_t half = K / 2;
  for (int64_t i = 0; i < half; ++i) {
    y[i * stride] = x[i] * cosine[i] - x[i + half] * sine[i];
    y[(i + half) * stride] = x[i + half] * cosine[i] + x[i] * sine[i];
  }
}

// Sixteen neighbouring keys of a kv head as [K, 16], so that one register holds a dim of all, and their values as [16, K'].
struct Page {
  const float *keys, *values;
};

// R rows of queries of one sequence and kv head against its pages: row r sees its first num_visible[r] keys.
// q [R, K]; scratch [R, 16 * num_pages]; o[r] -> K floats.
template <int R>
void attend_rows(const float* q, const int32_t* num_visible, const Page* pages, int64_t num_pages, int64_t K,
                 float* scratch, float* const* o) {
  const int64_t S = num_pages * kLanes;
  const float scale = 1.0f / std::sqrt(static_cast<float>(K));
  const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec largest[R];
  for (int r = 0; r < R; ++r) largest[r] = Vec{} - kInf;
  for (int64_t p = 0; p < num_pages; ++p) {
    const float* keys = pages[p].keys;
    Vec score[R] = {};
    // A page is not where the one before it was: the processor's own guesses end with each.
    const float* next = pages[std::min(p + 1, num_pages - 1)].keys;
    for (int64_t k = 0; k < K; ++k) {
      const Vec key = load(keys + k * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) score[r] += q[r * K + k] * key;
      __builtin_prefetch(next + k * kLanes);
      __builtin_prefetch(pages[p].values + k * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const IntVec visible = lane + static_cast<int32_t>(p * kLanes) < num_visible[r];
      const Vec masked = visible ? score[r] * scale : Vec{} - kInf;
      largest[r] = max(largest[r], masked);
      store(scratch + r * S + p * kLanes, masked);
    }
  }
  float inverse[R];
  for (int r = 0; r < R; ++r) {
    const float top = max(largest[r]);
    Vec total = {};
    for (int64_t s = 0; s < S; s += kLanes) {
      const Vec weight = exp(load(scratch + r * S + s) - top);
      total += weight;
      store(scratch + r * S + s, weight);
    }
    inverse[r] = 1.0f / sum(total);
  }
  const int64_t stride = (K + kLanes - 1) / kLanes * kLanes;
  const int64_t num_keys = *std::max_element(num_visible, num_visible + R);
  const auto columns = [&](int64_t first, auto width) {
    constexpr int C = width;
    Vec acc[R][C] = {};
    for (int64_t s = 0; s < num_keys; ++s) {
      const float* value = pages[s / kLanes].values + (s % kLanes) * stride + first;
      Vec v[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) v[c] = load(value + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float weight = scratch[r * S + s];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] += weight * v[c];
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        const Vec out = acc[r][c] * inverse[r];
        const int64_t at = first + c * kLanes;
        std::memcpy(o[r] + at, &out, std::min<int64_t>(kLanes, K - at) * sizeof(float));
      }
    }
  };
  int64_t first = 0;
  for (; first + 4 * kLanes <= stride; first += 4 * kLanes) columns(first, std::integral_constant<int, 4>());
  for (; first < stride; first += kLanes) columns(first, std::integral_constant<int, 1>());
}

// `num` neighbouring tokens of one sequence, of which the first sees `num_visible` keys and each one more than the one before.
// q [T, G, M, K], not rotated; o likewise.
void attend_tile(const Heads& heads, const float* q, const float* cosine, const float* sine, int64_t token, int64_t num,
                 int64_t g, int32_t num_visible, const Page* pages, float* o) {
  thread_local std::vector<float> rotated, scratch;
  const int64_t M = heads.M, K = heads.K, num_rows = num * M;
  const int64_t num_pages = (num_visible + num - 1 + kLanes - 1) / kLanes;
  rotated.resize(num_rows * K);
  scratch.resize(4 * num_pages * kLanes);
  const auto offset = [&](int64_t row) { return (((token + row / M) * heads.G + g) * M + row % M) * K; };
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t t = token + row / M;
    rotate(q + offset(row), cosine + t * (K / 2), sine + t * (K / 2), K, rotated.data() + row * K, 1);
  }
  for (int64_t row = 0; row < num_rows; row += 4) {
    const int64_t R = std::min<int64_t>(4, num_rows - row);
    int32_t visible[4];
    float* out[4];
    for (int64_t r = 0; r < R; ++r) {
      visible[r] = num_visible + static_cast<int32_t>((row + r) / M);
      out[r] = o + offset(row + r);
    }
    const int64_t needed = (visible[R - 1] + kLanes - 1) / kLanes;
    const float* rows = rotated.data() + row * K;
    switch (R) {
      case 4: attend_rows<4>(rows, visible, pages, needed, K, scratch.data(), out); break;
      case 3: attend_rows<3>(rows, visible, pages, needed, K, scratch.data(), out); break;
      case 2: attend_rows<2>(rows, visible, pages, needed, K, scratch.data(), out); break;
      case 1: attend_rows<1>(rows, visible, pages, needed, K, scratch.data(), out); break;
    }
  }
}

// Writes the rotated key and the value of a token into its lane of a page.
inline void write_key_value(const Heads& heads, const float* k, const float* v, const float* cosine, const float* sine,
                            int64_t token, int64_t g, float* keys, float* values, int64_t lane) {
  const int64_t K = heads.K, at = (token * heads.G + g) * K;
  rotate(k + at, cosine + token * (K / 2), sine + token * (K / 2), K, keys + lane, kLanes);
  std::memcpy(values + lane * heads.padded(), v + at, K * sizeof(float));
}

constexpr int64_t kTileTokens = 8;

// Attention over a paged cache: writes the keys and values of T new tokens, then lets each see its sequence up to itself.
// q [T, G, M, K]; k, v [T, G, K]; cosine, sine [T, K/2]; sequence [T]: row of the table, -1 for padding, tokens of a sequence
// side by side and in order; position [T]; table [sequences, pages]; caches [L, P, G, K, 16] and [L, P, G, 16, K'].
ffi::Error PagedAttention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 cosine, F32 sine, S32 sequence, S32 position,
                          S32 table, F32 key_cache, F32 value_cache, S32 layer, F32Out o, F32Out, F32Out) {
  const auto dims = q.dimensions();
  const int64_t T = dims[0], width = table.dimensions()[1];
  const Heads heads = {dims[1], dims[2], dims[3]};
  const int64_t key_page = heads.K * kLanes, value_page = heads.padded() * kLanes;
  float* keys = const_cast<float*>(layer_of(key_cache, layer));
  float* values = const_cast<float*>(layer_of(value_cache, layer));
  const float *qd = q.typed_data(), *kd = k.typed_data(), *vd = v.typed_data(), *cd = cosine.typed_data(),
              *sd = sine.typed_data();
  const int32_t *sequences = sequence.typed_data(), *positions = position.typed_data(), *pages = table.typed_data();
  float* out = o->typed_data();

  struct Tile {
    int64_t token, num;
  };
  std::vector<Tile> tiles;
  for (int64_t t = 0; t < T; ++t) {
    if (sequences[t] < 0) {
      std::memset(out + t * heads.G * heads.M * heads.K, 0, heads.G * heads.M * heads.K * sizeof(float));
      continue;
    }
    for (int64_t g = 0; g < heads.G; ++g) {
      const int64_t page = pages[sequences[t] * width + positions[t] / kLanes] * heads.G + g;
      write_key_value(heads, kd, vd, cd, sd, t, g, keys + page * key_page, values + page * value_page,
                      positions[t] % kLanes);
    }
    const bool goes_on = !tiles.empty() && tiles.back().num < kTileTokens && tiles.back().token + tiles.back().num == t &&
                         sequences[t - 1] == sequences[t];
    if (goes_on) {
      ++tiles.back().num;
    } else {
      tiles.push_back({t, 1});
    }
  }
  const Tile* tile_data = tiles.data();
  parallel(pool, static_cast<int64_t>(tiles.size()) * heads.G, [=](int64_t i) {
    thread_local std::vector<Page> of_sequence;
    const Tile tile = tile_data[i / heads.G];
    const int64_t g = i % heads.G, num_keys = positions[tile.token] + tile.num;
    of_sequence.resize((num_keys + kLanes - 1) / kLanes);
    for (size_t p = 0; p < of_sequence.size(); ++p) {
      const int64_t page = pages[sequences[tile.token] * width + p] * heads.G + g;
      of_sequence[p] = {keys + page * key_page, values + page * value_page};
    }
    attend_tile(heads, qd, cd, sd, tile.token, tile.num, g, positions[tile.token] + 1, of_sequence.data(), out);
  });
  return ffi::Error::Success();
}

// Attention inside a packed row (postrl/learner/batch.py): a token sees, in this order, its segment's parent and its own
// segment up to itself. q [T, G, M, K]; k, v [T, G, K]; segment, parent [T]; 0 is padding. A segment's tokens stand side by
// side.
ffi::Error PackedAttention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 cosine, F32 sine, S32 segment, S32 parent,
                           F32Out o) {
  const auto dims = q.dimensions();
  const int64_t T = dims[0];
  const Heads heads = {dims[1], dims[2], dims[3]};
  const float *qd = q.typed_data(), *kd = k.typed_data(), *vd = v.typed_data(), *cd = cosine.typed_data(),
              *sd = sine.typed_data();
  const int32_t *segments = segment.typed_data(), *parents = parent.typed_data();
  float* out = o->typed_data();

  struct Run {
    int64_t token, end, segment_begin;
  };
  constexpr int64_t kRunTokens = 64;  // what one thread takes at once of a long segment
  std::vector<Run> runs;
  for (int64_t begin = 0, end; begin < T; begin = end) {
    for (end = begin + 1; end < T && segments[end] == segments[begin];) ++end;
    if (segments[begin] == 0) {
      std::memset(out + begin * heads.G * heads.M * heads.K, 0, (end - begin) * heads.G * heads.M * heads.K * sizeof(float));
      continue;
    }
    for (int64_t t = begin; t < end; t += kRunTokens) runs.push_back({t, std::min(end, t + kRunTokens), begin});
  }
  const Run* run_data = runs.data();
  parallel(pool, static_cast<int64_t>(runs.size()) * heads.G, [=](int64_t i) {
    thread_local std::vector<float> keys, values;
    thread_local std::vector<Page> pages;
    const Run run = run_data[i / heads.G];
    const int64_t g = i % heads.G, key_page = heads.K * kLanes, value_page = heads.padded() * kLanes;
    std::vector<int64_t> visible;
    for (int64_t t = 0; t < run.segment_begin; ++t) {
      if (segments[t] == parents[run.token]) visible.push_back(t);
    }
    const int64_t num_before = static_cast<int64_t>(visible.size()) + run.token - run.segment_begin;
    for (int64_t t = run.segment_begin; t < run.end; ++t) visible.push_back(t);
    const int64_t num_pages = (static_cast<int64_t>(visible.size()) + kLanes - 1) / kLanes;
    keys.assign(num_pages * key_page, 0.0f);
    values.assign(num_pages * value_page, 0.0f);
    pages.resize(num_pages);
    for (int64_t p = 0; p < num_pages; ++p) pages[p] = {keys.data() + p * key_page, values.data() + p * value_page};
    for (size_t s = 0; s < visible.size(); ++s) {
      const int64_t p = s / kLanes;
      write_key_value(heads, kd, vd, cd, sd, visible[s], g, keys.data() + p * key_page, values.data() + p * value_page,
                      s % kLanes);
    }
    for (int64_t t = run.token; t < run.end; t += kTileTokens) {
      attend_tile(heads, qd, cd, sd, t, std::min(kTileTokens, run.end - t), g,
                  static_cast<int32_t>(num_before + t - run.token + 1), pages.data(), out);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(linear, Linear,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>()
                                  .Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(linear_add, LinearAdd,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Arg<S32>().Attr<float>("scale").Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rms_norm, RmsNorm,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Attr<float>("eps").Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(swiglu, SwiGlu,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(log_probability, LogProbability,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Ret<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(sample, Sample,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Ret<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(rope_angles, RopeAngles,
                              ffi::Ffi::Bind().Arg<S32>().Attr<float>("theta").Ret<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention, PagedAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
                                  .Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<F32>().Arg<F32>().Arg<S32>()
                                  .Ret<F32>().Ret<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(packed_attention, PackedAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()
                                  .Arg<F32>().Arg<S32>().Arg<S32>().Ret<F32>());
