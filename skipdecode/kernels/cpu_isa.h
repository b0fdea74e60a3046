// The computation of cpu.cpp, compiled once for each instruction set: ISA is the namespace, LANES the number of floats
// in a register. Nothing of std is used here: an inline function of the library would be compiled for the widest set and
// might be linked in where a narrower one has to run.

#if defined(DOT_BF16) && !defined(TILES)
#define DOT_BF16_BESIDE  // interleaved rows of bfloat16; tiles have another layout
#endif

namespace ISA {

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

static inline vf load(const float *p) { vf v; __builtin_memcpy(&v, p, sizeof v); return v; }
static inline vi load(const int32_t *p) { vi v; __builtin_memcpy(&v, p, sizeof v); return v; }
static inline vf load(const bf16 *p) {
#if LANES == 16  // the compiler makes three times as many instructions of the code below
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(MADD_INT8)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vi) << 16);
#endif
}
static inline void store(float *p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
static inline vf all(float x) { return x - (vf){}; }
static inline vi all(int32_t x) { return x - (vi){}; }
static inline vf larger(vf a, vf b) { return a > b ? a : b; }
static inline vf between(vf x, float least, float most) {
  x = larger(x, all(least));
  return x < most ? x : all(most);
}
static inline float total(vf v) {
  float each[LANES];
  store(each, v);
  for (int step = LANES / 2; step; step /= 2)
    for (int i = 0; i < step; i++) each[i] += each[i + step];
  return each[0];
}
static inline float greatest(vf v) {
  float each[LANES];
  store(each, v);
  for (int step = LANES / 2; step; step /= 2)
    for (int i = 0; i < step; i++) each[i] = each[i] > each[i + step] ? each[i] : each[i + step];
  return each[0];
}

// The sums of the halves of two vectors, side by side: a tree of these adds up the values of several vectors at once.
#if LANES == 16
static inline vf halves8(vf a, vf b) {
  const vi low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 8);
}
static inline vf halves4(vf a, vf b) {
  const vi low = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 4);
}
static inline vf halves2(vf a, vf b) {
  const vi low = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 2);
}
// The sums of eight vectors.
static inline void totals8(const vf *v, float *sums) {
  vf a = halves4(halves8(v[0], v[1]), halves8(v[2], v[3]));
  vf b = halves4(halves8(v[4], v[5]), halves8(v[6], v[7]));
  float pairs[16];
  store(pairs, halves2(a, b));
  for (int i = 0; i < 8; i++) sums[i] = pairs[2 * i] + pairs[2 * i + 1];
}
#else
static inline vf halves4(vf a, vf b) {
  const vi low = {0, 1, 2, 3, 8, 9, 10, 11};
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 4);
}
static inline vf halves2(vf a, vf b) {
  const vi low = {0, 1, 4, 5, 8, 9, 12, 13};
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 2);
}
static inline void totals8(const vf *v, float *sums) {
  float pairs[16];
  store(pairs, halves2(halves4(v[0], v[1]), halves4(v[2], v[3])));
  store(pairs + 8, halves2(halves4(v[4], v[5]), halves4(v[6], v[7])));
  for (int i = 0; i < 8; i++) sums[i] = pairs[2 * i] + pairs[2 * i + 1];
}
#endif

// exp to a few units in the last place; 0 below the smallest normal number.
static inline vf exponential(vf x) {
  vf n = x * 1.44269504f + 12582912.0f;  // rounded according to the bits that are cut off
  vi power = (vi)n << 23;
  n -= 12582912.0f;
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  y = (vf)((vi)y + power);
  return x < -87.0f ? all(0.0f) : y;
}

static inline vf activated(vf x, int kind) {
  switch (kind) {
    case RELU: return larger(x, all(0.0f));
    case SILU: return x / (exponential(between(-x, -80.0f, 80.0f)) + 1.0f);
    case GELU_TANH: {  // x (1 + tanh u) / 2 = x / (1 + exp(-2u))
      vf u = x * (0.7978845608f + 0.0356774081f * x * x);
      return x / (exponential(between(-2.0f * u, -80.0f, 80.0f)) + 1.0f);
    }
    case GELU: {  // erf by Abramowitz and Stegun 7.1.26, to 1.5e-7
      vf z = x * 0.70710678f, a = z < 0.0f ? -z : z;
      vf t = 1.0f / (a * 0.3275911f + 1.0f);
      vf p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
      vf erf = 1.0f - p * exponential(-a * a);
      return 0.5f * x * (1.0f + (z < 0.0f ? -erf : erf));
    }
    default: return x;
  }
}

// ---- rows: norms, and the layouts that the products read

static void norm_row(const Norm &norm, const float *x, float *y, int n) {
  int whole = n / LANES * LANES;
  float mean = 0;
  if (norm.kind == LAYER_NORM) {
    vf sum = {};
    for (int i = 0; i < whole; i += LANES) sum += load(x + i);
    mean = total(sum);
    for (int i = whole; i < n; i++) mean += x[i];
    mean /= n;
  }
  vf sum = {};
  for (int i = 0; i < whole; i += LANES) {
    vf centred = load(x + i) - mean;
    sum += centred * centred;
  }
  float square = total(sum);
  for (int i = whole; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
  float factor = 1.0f / __builtin_sqrtf(square / n + norm.eps);
  for (int i = 0; i < whole; i += LANES) {
    vf v = (load(x + i) - mean) * factor;
    if (norm.weight) v *= load(norm.weight + i);
    if (norm.bias) v += load(norm.bias + i);
    store(y + i, v);
  }
  for (int i = whole; i < n; i++) {
    float v = (x[i] - mean) * factor;
    if (norm.weight) v *= norm.weight[i];
    if (norm.bias) v += norm.bias[i];
    y[i] = v;
  }
}

static inline bf16 rounded_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return (bf16){(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Whether rows that are rounded to 8 bits are stored in 16 bits, interleaved by 4 inputs.
static inline bool in_16_bits(const Linear &linear, int apart) {
#ifdef MADD_INT8
  return linear.kind == INT8 && apart > 1;
#else
  return false;
#endif
}

// A row in 8 bits with one scale, and the sums of its groups times the shift of the weights. There are `apart` times 16
// bytes from each 16 bytes of inputs, and of sums, to the next.
static void quantise_row(const Linear &linear, const float *x, int8_t *q, float *scale, int32_t *shift, int apart) {
  typedef int8_t vb __attribute__((vector_size(LANES)));
  int n = linear.inputs, padded = padded_inputs(linear), whole = n / LANES * LANES;
  vf most = {};
  for (int i = 0; i < whole; i += LANES) {
    vf v = load(x + i);
    most = larger(most, larger(v, -v));
  }
  float largest = greatest(larger(most, all(1e-30f)));
  for (int i = whole; i < n; i++) {
    float a = x[i] < 0 ? -x[i] : x[i];
    largest = a > largest ? a : largest;
  }
  float factor = 127.0f / largest, rest[LANES] = {};
  *scale = largest / 127.0f;
  for (int i = whole; i < n; i++) rest[i - whole] = x[i];
  int group = linear.kind == INT4 ? GROUP : padded, offset = linear.kind == INT4 ? 8 : 128;
  for (int start = 0, g = 0; start < padded; start += group, g++) {
    vi sums = {};
    for (int i = start; i < start + group; i += LANES) {
      vf v = i < whole ? load(x + i) : i == whole ? load(rest) : vf{};
      vi rounded = (vi)(v * factor + 12582912.0f) - 0x4b400000;  // to even, according to the bits that are cut off
      sums += rounded;
      if (in_16_bits(linear, apart)) {
        typedef int16_t vs __attribute__((vector_size(2 * LANES)));
        vs shorts = __builtin_convertvector(rounded, vs);
        for (int j = 0; j < LANES; j += 4)
          __builtin_memcpy((int16_t *)q + (int64_t)(i + j) * apart, (const int16_t *)&shorts + j, 8);
        continue;
      }
      vb bytes = __builtin_convertvector(rounded, vb);
      __builtin_memcpy(q + (int64_t)i / 16 * 16 * apart + i % 16, &bytes, LANES);
    }
    int32_t sum = 0;
    for (int j = 0; j < LANES; j++) sum += sums[j];
    shift[g / 4 * 4 * apart + g % 4] = -offset * sum;
  }
}

#if LANES == 16
// Transpose 16 rows of 16 floats.
static inline void turn16(const float *from, int64_t stride, float *to, int64_t to_stride) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * stride);
  for (int i = 0; i < 16; i += 2) {  // pairs of rows, in each quarter
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {  // fours of rows
      __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int i = 0; i < 4; i++) {  // column i of each quarter, of all rows
    __m512 first = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x44), second = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xee);
    __m512 third = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x44), fourth = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xee);
    _mm512_storeu_ps(to + i * to_stride, _mm512_shuffle_f32x4(first, third, 0x88));
    _mm512_storeu_ps(to + (4 + i) * to_stride, _mm512_shuffle_f32x4(first, third, 0xdd));
    _mm512_storeu_ps(to + (8 + i) * to_stride, _mm512_shuffle_f32x4(second, fourth, 0x88));
    _mm512_storeu_ps(to + (12 + i) * to_stride, _mm512_shuffle_f32x4(second, fourth, 0xdd));
  }
}
#endif

#if LANES == 8
// Transpose 8 rows of 8 floats.
static inline void turn8(const float *from, int64_t stride, float *to, int64_t to_stride) {
  const vi low = {0, 8, 1, 9, 4, 12, 5, 13}, low_pairs = {0, 1, 8, 9, 4, 5, 12, 13}, low_fours = {0, 1, 2, 3, 8, 9, 10, 11};
  vf a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = load(from + i * stride);
  for (int i = 0; i < 8; i += 2) {  // pairs of rows, in each half
    b[i] = __builtin_shuffle(a[i], a[i + 1], low);
    b[i + 1] = __builtin_shuffle(a[i], a[i + 1], low + 2);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {  // fours of rows: columns 2 j and 2 j + 1 of each half
      a[i + 2 * j] = __builtin_shuffle(b[i + j], b[i + j + 2], low_pairs);
      a[i + 2 * j + 1] = __builtin_shuffle(b[i + j], b[i + j + 2], low_pairs + 2);
    }
  for (int i = 0; i < 4; i++) {
    store(to + i * to_stride, __builtin_shuffle(a[i], a[i + 4], low_fours));
    store(to + (4 + i) * to_stride, __builtin_shuffle(a[i], a[i + 4], low_fours + 4));
  }
}
#endif

// Whether bfloat16 weights are rearranged once for many rows: in pairs of inputs, where the processor has fast products
// of pairs.
static inline bool in_pairs(const Linear &linear, const Inputs &inputs, int rows) {
#ifdef DOT_BF16_BESIDE
  return linear.kind == BFLOAT16 && rows > FEW_ROWS && linear.inputs % 32 == 0 && !inputs.by_floats;
#else
  return false;
#endif
}

// Elsewhere they are converted to float, and rows aren't interleaved.
static inline bool as_floats(const Linear &linear, const Inputs &inputs, int rows) {
#ifdef TILES
  return false;
#else
  return linear.kind == BFLOAT16 && rows > FEW_ROWS && !in_pairs(linear, inputs, rows);
#endif
}

// How many rows are interleaved, [rows / beside][inputs][beside][16 inputs in 8 bits, 4 in 16, 32 in bfloat16]: rows that
// are multiplied together are one stream then and need one address. 1: rows aren't interleaved.
static inline int beside(const Linear &linear, int rows) {
#ifdef DOT_INT8
  if ((linear.kind == INT8 || linear.kind == INT4) && rows >= 4) {
#ifdef TILES
    if (linear.kind == INT8 && rows >= 16) return 1;
#endif
    return BESIDE;
  }
#endif
#ifdef MADD_INT8
  if (linear.kind == INT8 && rows >= 4) return BESIDE_16;
#endif
#ifdef DOT_BF16_BESIDE
  if (linear.kind == BFLOAT16 && rows >= 2 && linear.inputs % 32 == 0) return BESIDE_BF16;
#endif
  return 1;
}

#ifdef TILES
// With fewer rows only the time of reading the weights counts.
static inline int bf16_in_tiles(const Linear &linear, int rows) {
  return linear.kind == BFLOAT16 && rows > 4 && linear.inputs % 32 == 0;
}

// 16 rows from `row` on in tiles of 32 inputs, [inputs / 32][16 pairs][16 rows][2]; there is room for 16.
static void prepare_tiles(const Linear &linear, const float *x, const Inputs &inputs, int row, int rows) {
  int n = linear.inputs, count = rows - row < 16 ? rows - row : 16;
  float pairs[16][16] __attribute__((aligned(64))) = {}, *to = (float *)((bf16 *)inputs.values + (int64_t)row * n);
  for (int i = 0; i < n; i += 32, to += 256) {
    for (int r = 0; r < count; r++) {
      const float *from = x + (int64_t)(row + r) * n + i;
      __m256bh low = _mm512_cvtneps_pbh(_mm512_loadu_ps(from)), high = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + 16));
      __builtin_memcpy(pairs[r], &low, 32);
      __builtin_memcpy(pairs[r] + 8, &high, 32);
    }
    turn16(pairs[0], 16, to, 16);
  }
}
#endif

static void prepare_row(const Linear &linear, const float *x, const Inputs &inputs, int row, int rows) {
  int apart = beside(linear, rows), place = row % apart;
  int64_t first = row - place;
  if (linear.kind == BFLOAT16) {
#ifdef DOT_BF16
    bf16 *to = (bf16 *)inputs.values + first * inputs.stride + 32 * place;
    int i = 0;
    for (; i + 16 <= linear.inputs; i += 16) {
      __m256bh h = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
      __builtin_memcpy(to + i / 32 * 32 * apart + i % 32, &h, 32);
    }
    for (; i < linear.inputs; i++) to[i] = rounded_bf16(x[i]);  // of a row that isn't interleaved
#endif
  } else if (linear.kind != FLOAT32) {
    int8_t *to = (int8_t *)inputs.values + (in_16_bits(linear, apart) ? 2 : 1) * first * inputs.stride;
    to += (in_16_bits(linear, apart) ? 8 : 16) * place;
    quantise_row(linear, x, to, inputs.scales + row, inputs.shifts + first * inputs.groups + 4 * place, apart);
  }
}

// ---- products of rows of floats: O rows of weights, 8 or 1, with a row of inputs

// The totals of sums over the first `whole` inputs, and the products of the rest.
template <int O, class W, class X>
static inline void end_dots(const vf *sums, const W *w, int64_t stride, const X *x, int whole, int n, float *out) {
  float found[8];
  totals8(sums, found);
  for (int o = 0; o < O; o++) {
    for (int i = whole; i < n; i++) found[o] += as_float(w[o * stride + i]) * as_float(x[i]);
    out[o] = found[o];
  }
}

template <int O, class W>
static inline void dots(const W *w, int64_t stride, const float *x, int n, float *out) {
  vf sums[8] = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf input = load(x + i);
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) sums[o] += load(w + o * stride + i) * input;
  }
  end_dots<O>(sums, w, stride, x, i, n, out);
}

#ifdef DOT_BF16
template <int O>
static inline void dots(const bf16 *w, int64_t stride, const bf16 *x, int n, float *out) {
  vf sums[8] = {};
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    __m512bh input, weights;
    __builtin_memcpy(&input, x + i, 64);
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) {
      __builtin_memcpy(&weights, w + o * stride + i, 64);
      __builtin_prefetch(w + (O + o) * stride + i, 0, 2);
      sums[o] = (vf)_mm512_dpbf16_ps((__m512)sums[o], weights, input);
    }
  }
  end_dots<O>(sums, w, stride, x, i, n, out);
}
#endif

#ifdef DOT_BF16_BESIDE
// Add the products of O rows of weights and R interleaved rows of inputs, of inputs `begin` to `end`, to their sums
// [O][8]. Each value that is read is used for all rows of the other side.
template <int O, int R>
static inline void add_dots(const bf16 *w, int64_t stride, const bf16 *x, int begin, int end, vf *sums) {
  vf own[O][R];
#pragma GCC unroll 8
  for (int o = 0; o < O; o++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) own[o][r] = sums[8 * o + r];
#pragma GCC unroll 2
  for (int i = begin; i < end; i += 32) {
    __m512bh weights[O], input;
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) {
      __builtin_memcpy(&weights[o], w + o * stride + i, 64);
      __builtin_prefetch(w + (O + o) * stride + i);  // a processor doesn't prefetch rows as short as these
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      __builtin_memcpy(&input, x + BESIDE_BF16 * i + 32 * r, 64);
#pragma GCC unroll 8
      for (int o = 0; o < O; o++) own[o][r] = (vf)_mm512_dpbf16_ps((__m512)own[o][r], weights[o], input);
    }
  }
#pragma GCC unroll 8
  for (int o = 0; o < O; o++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[8 * o + r] = own[o][r];
}

// 16 outputs, or as many as there are, of R rows: out [R][16]. The sums are those of `dots`, in the same order.
template <int O, int R>
static void dots_of_rows(const bf16 *w, const bf16 *x, int n, int count, float *out) {
  enum { PART = 2048 };  // inputs: so many that those of R rows stay in the first cache
  vf sums[16][8] = {};
  for (int begin = 0; begin < n; begin += PART) {
    int end = begin + PART < n ? begin + PART : n, o = 0;
    for (; o + O <= count; o += O) add_dots<O, R>(w + (int64_t)o * n, n, x, begin, end, sums[o]);
    for (; o < count; o++) add_dots<1, R>(w + (int64_t)o * n, n, x, begin, end, sums[o]);
  }
  for (int o = 0; o < count; o++) {
    float found[8];
    totals8(sums[o], found);
    for (int r = 0; r < R; r++) out[16 * r + o] = found[r];
  }
}
#endif

#ifndef DOT_BF16
// 16 outputs, or as many as there are, of R rows of floats: out [R][16]. Each value that is read is used for all rows of
// the other side; the sums are those of `dots`, in the same order.
template <int O, int R>
static void dots_of_rows(const bf16 *w, const float *x, int n, int count, float *out) {
  enum { PART = 1024 };  // inputs: so many that those of R rows stay in the first cache
  int whole = n / LANES * LANES;
  vf sums[R][16] = {};
  for (int begin = 0; begin < whole; begin += PART) {
    int end = begin + PART < whole ? begin + PART : whole;
    for (int o = 0; o < 16; o += O) {
      const bf16 *of[O];
      vf own[O][R];
#pragma GCC unroll 8
      for (int k = 0; k < O; k++) {
        of[k] = w + (int64_t)(o + k < count ? o + k : 0) * n;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) own[k][r] = sums[r][o + k];
      }
      for (int i = begin; i < end; i += LANES) {
        vf weights[O];
#pragma GCC unroll 8
        for (int k = 0; k < O; k++) {
          weights[k] = load(of[k] + i);
          __builtin_prefetch(of[k] + (int64_t)O * n + i);  // a processor doesn't prefetch rows as short as these
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          vf input = load(x + (int64_t)r * n + i);
#ifdef MADD_INT8
          __asm__("" : "+x"(input));  // read once, not by each product: reading is what takes longest
#endif
#pragma GCC unroll 8
          for (int k = 0; k < O; k++) own[k][r] += weights[k] * input;
        }
      }
#pragma GCC unroll 8
      for (int k = 0; k < O; k++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r][o + k] = own[k][r];
    }
  }
  for (int r = 0; r < R; r++) {
    int o = 0;
    for (; o + 8 <= count; o += 8) end_dots<8>(sums[r] + o, w + (int64_t)o * n, n, x + (int64_t)r * n, whole, n, out + 16 * r + o);
    for (; o < count; o++) {
      vf one[8] = {sums[r][o]};
      end_dots<1>(one, w + (int64_t)o * n, n, x + (int64_t)r * n, whole, n, out + 16 * r + o);
    }
  }
}
#endif

// Products of x with `count` rows of weights.
template <class W, class X>
static inline void all_dots(const W *w, int64_t stride, const X *x, int n, int count, float *out) {
  int o = 0;
  for (; o + 8 <= count; o += 8) dots<8>(w + o * stride, stride, x, n, out + o);
  for (; o < count; o++) dots<1>(w + o * stride, stride, x, n, out + o);
}

// ---- products of 8-bit rows with blocks of 16 outputs: 4 inputs of each side by side, [16][4] bytes

// Sums [16] of products of unsigned bytes [16][4] with the same four signed ones.
#if defined(DOT_INT8)
typedef __m512i Sums;  // the compiler keeps no more than 12 in registers if they are in a struct
static inline Sums start(int32_t x) { return _mm512_set1_epi32(x); }
static inline __m512i bytes(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline __m512i low_nibbles(__m512i b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
static inline __m512i high_nibbles(__m512i b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }
template <int KIND> static inline void add(Sums &s, __m512i w, const int8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  s = _mm512_dpbusd_epi32(s, w, _mm512_set1_epi32(four));
}
static inline void floats(const Sums &s, float *out) { _mm512_storeu_ps(out, _mm512_cvtepi32_ps(s)); }
#elif defined(MADD_INT8)
struct Bytes { __m256i a, b; };
struct Sums { __m256i a, b; };
static inline Sums start(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Bytes bytes(const uint8_t *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
static inline __m256i low_nibbles(__m256i b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
static inline Bytes low_nibbles(Bytes w) { return {low_nibbles(w.a), low_nibbles(w.b)}; }
static inline Bytes high_nibbles(Bytes w) {
  return {low_nibbles(_mm256_srli_epi16(w.a, 4)), low_nibbles(_mm256_srli_epi16(w.b, 4))};
}
static inline __m256i products(__m256i sum, __m256i w, __m256i x) {
  w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));  // 255 * 127 twice wouldn't fit: it is shifted back, and its sign moves to the other factor
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// The sums of a group of 4-bit values fit in 16 bits: at most 16 * 15 * 127.
template <int KIND> static inline void add(Sums &s, Bytes w, const int8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  __m256i each = _mm256_set1_epi32(four);
  if (KIND == INT4) {
    s.a = _mm256_add_epi16(s.a, _mm256_maddubs_epi16(w.a, each));
    s.b = _mm256_add_epi16(s.b, _mm256_maddubs_epi16(w.b, each));
  } else {
    s.a = products(s.a, w.a, each);
    s.b = products(s.b, w.b, each);
  }
}
static inline void floats(const Sums &s, float *out) {
  _mm256_storeu_ps(out, _mm256_cvtepi32_ps(s.a));
  _mm256_storeu_ps(out + 8, _mm256_cvtepi32_ps(s.b));
}
#define SHIFTED_BACK 1
#define GROUPS_IN_16_BITS
static inline Sums start_group(int32_t) { return start(0); }
static inline void floats_of_group(const Sums &s, int32_t shift, float *out) {
  const __m256i ones = _mm256_set1_epi16(1), shifts = _mm256_set1_epi32(shift);
  floats({_mm256_add_epi32(_mm256_madd_epi16(s.a, ones), shifts), _mm256_add_epi32(_mm256_madd_epi16(s.b, ones), shifts)}, out);
}
#elif defined(__ARM_FEATURE_DOTPROD)
struct Bytes { uint8x16_t v[4]; };
struct Sums { int32x4_t v[4]; };
static inline Sums start(int32_t x) {
  Sums s;
  for (int i = 0; i < 4; i++) s.v[i] = vdupq_n_s32(x);
  return s;
}
static inline Bytes bytes(const uint8_t *p) {
  Bytes w;
  for (int i = 0; i < 4; i++) w.v[i] = vld1q_u8(p + 16 * i);
  return w;
}
static inline Bytes low_nibbles(Bytes w) {
  for (int i = 0; i < 4; i++) w.v[i] = vandq_u8(w.v[i], vdupq_n_u8(15));
  return w;
}
static inline Bytes high_nibbles(Bytes w) {
  for (int i = 0; i < 4; i++) w.v[i] = vshrq_n_u8(w.v[i], 4);
  return w;
}
template <int KIND> static inline void add(Sums &s, Bytes w, const int8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  int8x16_t each = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int i = 0; i < 4; i++) {
    uint8x16_t u = KIND == INT4 ? w.v[i] : veorq_u8(w.v[i], vdupq_n_u8(128));
    s.v[i] = vdotq_s32(s.v[i], vreinterpretq_s8_u8(u), each);
  }
}
static inline void floats(const Sums &s, float *out) {
  for (int i = 0; i < 4; i++) vst1q_f32(out + 4 * i, vcvtq_f32_s32(s.v[i]));
}
#define SHIFTED_BACK 1
#else
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef float sixteen __attribute__((vector_size(64)));
struct Sums { ints v; };
static inline Sums start(int32_t x) { return {x - (ints){}}; }
static inline words bytes(const uint8_t *p) { words w; __builtin_memcpy(&w, p, 64); return w; }
static inline words low_nibbles(words w) { return w & 0x0f0f0f0fu; }
static inline words high_nibbles(words w) { return (w >> 4) & 0x0f0f0f0fu; }
template <int KIND> static inline void add(Sums &s, words w, const int8_t *x) {
  for (int i = 0; i < 4; i++) s.v += (ints)((w >> (8 * i)) & 255u) * (int32_t)x[i];
}
static inline void floats(const Sums &s, float *out) {
  sixteen f = __builtin_convertvector(s.v, sixteen);
  __builtin_memcpy(out, &f, 64);
}
#endif

#ifndef GROUPS_IN_16_BITS
static inline Sums start_group(int32_t shift) { return start(shift); }
static inline void floats_of_group(const Sums &s, int32_t, float *out) { floats(s, out); }
#endif

// Weights are read once and in order, but a processor's own prefetching ends with a page. B blocks of `size` bytes are
// read at once, and then the next B. This is the distance in bytes from what is read to what is to be prefetched.
template <int B> static inline int64_t ahead(int64_t place, int64_t size) {
  enum { BYTES = 6144 / B };  // of all blocks together a page and a half
  return place + BYTES < size ? BYTES : BYTES + (B - 1) * size;
}

// Prefetch into the second cache with each line of weights that is read: a core allows only few outstanding loads into
// the first one. Where rows take several passes over B blocks, each pass prefetches a part of the next B blocks, so that
// memory is never idle, if the cache holds both. With wide registers two passes compute too little for that.
struct Further {
  const char *next = 0;
  uint64_t place = 0, step = 0;  // the next line to prefetch, and its increment with each line that is read; in 65536ths
  Further(const void *blocks, int64_t bytes, int pass, int passes) {
    enum { MOST = 1 << 18, LEAST = LANES == 16 ? 3 : 2 };
    if (passes < LEAST || bytes > MOST) return;
    next = (const char *)blocks + bytes, step = 65536 / passes, place = pass * step * (bytes / 64);
  }
  void ask(const void *line, int64_t bytes) {
    if (!next) return __builtin_prefetch((const char *)line + bytes, 0, 2);
    __builtin_prefetch(next + place / 65536 * 64, 0, 2);
    place += step;
  }
};

// R rows with B blocks of outputs from block `first` on: out [R][B * 16]; rows beyond `count` aren't stored. Weights are
// [outputs / 16][inputs][16].
template <int R, int B>
static inline void float_tile(const Linear &linear, const float *x, int row, int count, int first, int pass, int passes,
                              float *out) {
  enum { PARTS = 16 / LANES };
  int n = linear.inputs;
  const float *w = (const float *)linear.weight + (int64_t)first * n * 16;
  Further further(w, (int64_t)B * n * 64, pass, passes);
  const float *at[R];
  for (int r = 0; r < R; r++) at[r] = x + (int64_t)(row + (r < count ? r : 0)) * n;
  vf sums[R][B][PARTS] = {};  // in registers where every loop over them is unrolled
  for (int i = 0; i < n; i++) {
    vf weights[B][PARTS];
    int64_t next = ahead<B>((int64_t)i * 64, (int64_t)n * 64);
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      const float *from = w + ((int64_t)b * n + i) * 16;
      further.ask(from, next);
      for (int p = 0; p < PARTS; p++) weights[b][p] = load(from + p * LANES);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      float input = at[r][i];
#pragma GCC unroll 4
      for (int b = 0; b < B; b++)
        for (int p = 0; p < PARTS; p++) sums[r][b][p] += weights[b][p] * input;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++)
      for (int p = 0; p < PARTS; p++) store(out + (r * B + b) * 16 + p * LANES, sums[r][b][p]);
}

// R rows in 8 bits, each with its own address or one beside the other; `four` are inputs from the 4 (i + j)-th on, where i is
// a multiple of 4 and j of 0 to 3.
template <int R> struct Apart {
  const int8_t *at[R];
  const int32_t *shifts[R];
  Apart(const Inputs &inputs, int row, int count) {
    for (int r = 0; r < R; r++) {
      int64_t place = row + (r < count ? r : 0);
      at[r] = (const int8_t *)inputs.values + place * inputs.stride;
      shifts[r] = inputs.shifts + place * inputs.groups;
    }
  }
  const int8_t *four(int r, int i, int j) const { return at[r] + 4 * (i + j); }
  int32_t shift(int r, int group) const { return shifts[r][group]; }
};
struct Beside {
  const int8_t *at;
  const int32_t *shifts;
  Beside(const Inputs &inputs, int row, int)
      : at((const int8_t *)inputs.values + row * inputs.stride), shifts(inputs.shifts + row * inputs.groups) {}
  const int8_t *four(int r, int i, int j) const { return at + 4 * BESIDE * i + 16 * r + 4 * j; }
  int32_t shift(int r, int group) const { return shifts[group / 4 * 4 * BESIDE + 4 * r + group % 4]; }
};

// As float_tile with 8 bits, [outputs / 16][inputs / 4][16][4].
template <int R, int B, class Rows>
static inline void int8_tile(const Linear &linear, const Inputs &inputs, int row, int count, int first, int pass, int passes,
                              float *out) {
  int steps = padded_inputs(linear) / 4;
  const uint8_t *w = (const uint8_t *)linear.weight + (int64_t)first * steps * 64;
  Further further(w, (int64_t)B * steps * 64, pass, passes);
  Rows x(inputs, row, count);
  Sums sums[R][B];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
#ifdef SHIFTED_BACK
      sums[r][b] = start(0);
#else
      sums[r][b] = start(x.shift(r, 0));
#endif
    }
  for (int i = 0; i < steps; i += 4) {
    int64_t next = ahead<B>(i * 64, steps * 64);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      decltype(bytes(w)) weights[B];  // before the rows, so that each four inputs are loaded only once
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) {
        const uint8_t *from = w + ((int64_t)b * steps + i + j) * 64;
        further.ask(from, next);
        weights[b] = bytes(from);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) add<INT8>(sums[r][b], weights[b], x.four(r, i, j));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      float *to = out + (r * B + b) * 16;
      floats(sums[r][b], to);
      const float *scales = linear.scale + (first + b) * 16;
      float scale = inputs.scales[row + (r < count ? r : 0)];
      for (int o = 0; o < 16; o++) to[o] *= scales[o] * scale;
    }
}

// The same with 4 bits: groups of 32 inputs have scales of their own.
template <int R, int B, class Rows>
static inline void int4_tile(const Linear &linear, const Inputs &inputs, int row, int count, int first, int pass, int passes,
                              float *out) {
  int groups = padded_inputs(linear) / GROUP;
  const uint8_t *w = (const uint8_t *)linear.weight + (int64_t)first * groups * 256;
  const bf16 *scales = (const bf16 *)linear.scale + (int64_t)first * groups * 16;
  Further further(w, (int64_t)B * groups * 256, pass, passes);
  Rows x(inputs, row, count);
  enum { PARTS = 16 / LANES };
  vf found[R][B][PARTS] = {};
  for (int g = 0; g < groups; g++) {
    int64_t next = ahead<B>(g * 256, groups * 256);
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      const uint8_t *group = w + ((int64_t)b * groups + g) * 256;
      Sums sums[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r] = start_group(x.shift(r, g));
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        further.ask(group + 64 * i, next);
        auto both = bytes(group + 64 * i);
        auto low = low_nibbles(both), high = high_nibbles(both);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          add<INT4>(sums[r], low, x.four(r, g * (GROUP / 4) + i / 2 * 4, i % 2 * 2));
          add<INT4>(sums[r], high, x.four(r, g * (GROUP / 4) + i / 2 * 4, i % 2 * 2 + 1));
        }
      }
      const bf16 *of_group = scales + ((int64_t)b * groups + g) * 16;
      __builtin_prefetch((const char *)of_group + next / 8);  // 32 bytes of scales for 256 of weights
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        float sum[16] __attribute__((aligned(64)));
        floats_of_group(sums[r], x.shift(r, g), sum);
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; p++) found[r][b][p] += load(sum + p * LANES) * load(of_group + p * LANES);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++)
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++)
        store(out + (r * B + b) * 16 + p * LANES, found[r][b][p] * inputs.scales[row + (r < count ? r : 0)]);
}

// ---- a whole projection, shared among the threads of a team

// Store outputs [R][width] from `first` on, of rows from `row` on, with bias, activation and residual.
static void finish(const Linear &linear, const float *found, int R, int width, int row, int first, const Output &to) {
  int count = linear.outputs - first < width ? linear.outputs - first : width;
  for (int r = 0; r < R; r++) {
    const float *from = found + r * width;
    float *y = to.values + (int64_t)(row + r) * to.stride + first;
    int o = 0;
    for (; o + LANES <= count; o += LANES) {
      vf v = load(from + o);
      if (linear.bias) v += load(linear.bias + first + o);
      if (to.activation) v = activated(v, to.activation);
      if (to.what == ADD) v += load(y + o);
      if (to.what == MULTIPLY) v *= load(y + o);
      store(y + o, v);
    }
    for (; o < count; o++) {
      float v = from[o];
      if (linear.bias) v += linear.bias[first + o];
      if (to.activation) v = activated(all(v), to.activation)[0];
      y[o] = to.what == ADD ? y[o] + v : to.what == MULTIPLY ? y[o] * v : v;
    }
  }
}

template <int R, int B, class Rows>
static inline void block_rows(const Linear &linear, const float *x, const Inputs &inputs, int row, int rows, int first,
                              const Output &to) {
  enum { MOST = LANES == 16 ? 12 : 4 };
  int count = rows - row < R ? rows - row : R, pass = row / MOST, passes = (rows + MOST - 1) / MOST;
  float found[R * B * 16];
  if (linear.kind == FLOAT32) float_tile<R, B>(linear, x, row, count, first, pass, passes, found);
  else if (linear.kind == INT8) int8_tile<R, B, Rows>(linear, inputs, row, count, first, pass, passes, found);
  else int4_tile<R, B, Rows>(linear, inputs, row, count, first, pass, passes, found);
  finish(linear, found, count, B * 16, row, first * 16, to);
}

// All rows with B blocks of outputs, as many rows at a time as there are registers for their sums.
template <int B>
static void block_unit(const Linear &linear, const float *x, const Inputs &inputs, int rows, int first, const Output &to) {
  int row = 0;
#if LANES == 16
  if (beside(linear, rows) > 1) {
    for (; row + 8 < rows; row += 12) block_rows<12, B, Beside>(linear, x, inputs, row, rows, first, to);
    if (row + 4 < rows) block_rows<8, B, Beside>(linear, x, inputs, row, rows, first, to);
    else if (row < rows) block_rows<4, B, Beside>(linear, x, inputs, row, rows, first, to);
    return;
  }
  for (; row + 12 <= rows; row += 12) block_rows<12, B, Apart<12>>(linear, x, inputs, row, rows, first, to);
  for (; row + 4 < rows; row += 8) block_rows<8, B, Apart<8>>(linear, x, inputs, row, rows, first, to);
#endif
  for (; row + 2 < rows; row += 4) block_rows<4, B, Apart<4>>(linear, x, inputs, row, rows, first, to);
  if (row + 2 == rows) block_rows<2, B, Apart<2>>(linear, x, inputs, row, rows, first, to);
  if (row + 1 == rows) block_rows<1, B, Apart<1>>(linear, x, inputs, row, rows, first, to);
}

#ifdef MADD_INT8
// Add the products of 8 outputs of a block, in 8 bits, and R of 4 interleaved rows, in 16 bits, to their sums [R][2], each
// of 4 outputs with two sums. A 16-bit product takes one instruction besides the addition; two 8-bit ones, which would
// overflow, take three. ASK lines are prefetched with each 4 that are read.
template <int R, int ASK>
static inline void add_pairs(const uint8_t *w, const int16_t *x, int steps, const uint8_t *next, __m256i *sums) {
  __m256i own[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) own[r][0] = sums[2 * r], own[r][1] = sums[2 * r + 1];
  for (int i = 0; i < steps; i += 4, w += 256, x += 16 * BESIDE_16) {
#pragma GCC unroll 2
    for (int a = 0; a < ASK; a++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w + 64 * j)));
      __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w + 64 * j + 16)));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        int64_t four;
        __builtin_memcpy(&four, x + 4 * (BESIDE_16 * j + r), 8);
        __m256i each = _mm256_set1_epi64x(four);
        own[r][0] = _mm256_add_epi32(own[r][0], _mm256_madd_epi16(a, each));
        own[r][1] = _mm256_add_epi32(own[r][1], _mm256_madd_epi16(b, each));
        __asm__("" : "+x"(own[r][0]), "+x"(own[r][1]));  // in this order: in the compiler's they don't stay in registers
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) sums[2 * r] = own[r][0], sums[2 * r + 1] = own[r][1];
}

template <int ASK>
static inline void add_pairs(const uint8_t *w, const int16_t *x, int rows, int steps, const uint8_t *next, __m256i *sums) {
  if (rows == 1) add_pairs<1, ASK>(w, x, steps, next, sums);
  else if (rows == 2) add_pairs<2, ASK>(w, x, steps, next, sums);
  else add_pairs<4, ASK>(w, x, steps, next, sums);
}

// All rows, interleaved in 16 bits, with a block of outputs in 8; integer sums are exact, so they equal those of
// `int8_tile`. Parts of inputs and rows stay in the first cache while each half of the outputs is computed.
static void pairs_unit(const Linear &linear, const Inputs &inputs, int rows, int first, const Output &to) {
  enum { PART = 128, PANEL = 32 };  // steps of 4 inputs, and rows
  int steps = padded_inputs(linear) / 4;
  const uint8_t *w = (const uint8_t *)linear.weight + (int64_t)first * steps * 64;
  for (int row = 0; row < rows; row += PANEL) {
    int count = rows - row < PANEL ? rows - row : PANEL;
    const int16_t *x = (const int16_t *)inputs.values + row * inputs.stride;
    __m256i sums[PANEL / 4][2][8] = {};
    for (int begin = 0; begin < steps; begin += PART) {
      int some = steps - begin < PART ? steps - begin : PART;
      int passes = row ? 4 : 0;  // the first four rows, or two if there are no more, prefetch the next part
      const uint8_t *part = w + (int64_t)begin * 64, *next = part + (int64_t)some * 64;
      for (int r = 0; r < count; r += 4)
        for (int half = 0; half < 2; half++, passes++) {
          const int16_t *from = x + r * inputs.stride + 4 * BESIDE_16 * begin;
          __m256i *of = sums[r / 4][half];
          if (passes >= 4) add_pairs<0>(part + 32 * half, from, count - r, some, next, of);
          else if (count > 4) add_pairs<1>(part + 32 * half, from, count - r, some, next + passes * some * 16, of);
          else add_pairs<2>(part + 32 * half, from, count - r, some, next + passes * some * 32, of);
        }
    }
    for (int r = 0; r < count; r += 4) {
      float found[4][16];
      int left = count - r < 4 ? count - r : 4;
      for (int k = 0; k < left; k++) {
        __m256i shift = _mm256_set1_epi32(inputs.shifts[(row + r) * inputs.groups + 4 * k]);
        vf scale = all(inputs.scales[row + r + k]);
        for (int half = 0; half < 2; half++) {
          const __m256i *of = sums[r / 4][half] + 2 * k;
          __m256i sum = _mm256_permute4x64_epi64(_mm256_hadd_epi32(of[0], of[1]), 0xd8);
          vf v = (vf)_mm256_cvtepi32_ps(_mm256_add_epi32(sum, shift));
          store(found[k] + 8 * half, v * (load(linear.scale + first * 16 + 8 * half) * scale));
        }
      }
      finish(linear, found[0], left, 16, row + r, first * 16, to);
    }
  }
}
#endif

#ifdef TILES
// Tiles of 16 rows of 64 bytes: sums 0 to 3, inputs 4 and 5, weights 6 and 7, whose layout is that of the blocks.
static void configure_tiles() {
  struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } __attribute__((aligned(64))) tiles = {};
  tiles.palette = 1;
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
  _tile_loadconfig(&tiles);
}

// All rows with 2 blocks of outputs in 8 bits; integer sums are exact, so they equal those of `int8_tile`.
static void int8_tiles_unit(const Linear &linear, const Inputs &inputs, int rows, int first, const Output &to) {
  int steps = padded_inputs(linear) / 4;
  const uint8_t *w = (const uint8_t *)linear.weight + (int64_t)first * steps * 64, *other = w + (int64_t)steps * 64;
  int32_t sums[32][32] __attribute__((aligned(64)));
  float found[32][32] __attribute__((aligned(64)));
  for (int row = 0; row < rows; row += 32) {
    const int8_t *x = (const int8_t *)inputs.values + (int64_t)row * inputs.stride, *lower = x + 16 * inputs.stride;
    int more = rows - row > 16;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < steps; i += 16) {
      _tile_loadd(4, x + 4 * i, inputs.stride);
      _tile_loadd(6, w + 64 * i, 64);
      _tile_loadd(7, other + 64 * i, 64);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if (more) {
        _tile_loadd(5, lower + 4 * i, inputs.stride);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
    _tile_stored(0, &sums[0][0], 128);
    _tile_stored(1, &sums[0][16], 128);
    _tile_stored(2, &sums[16][0], 128);
    _tile_stored(3, &sums[16][16], 128);
    int count = rows - row < 32 ? rows - row : 32;
    for (int r = 0; r < count; r++) {
      int32_t shift = inputs.shifts[(int64_t)(row + r) * inputs.groups];
      float scale = inputs.scales[row + r];
      const float *scales = linear.scale + first * 16;
      for (int o = 0; o < 32; o++) found[r][o] = (float)(sums[r][o] + shift) * (scales[o] * scale);
    }
    finish(linear, found[0], count, 32, row, first * 16, to);
  }
}

// All rows with 32 outputs from `first` on, or as many as there are, in bfloat16, of the inputs of steps `begin` to `end`.
// The model's own weights are the left factor and the inputs the right one, so that sums are transposed.
static void bf16_tiles_unit(const Linear &linear, const Inputs &inputs, int rows, int first, int begin, int end,
                            const Output &to) {
  int n = linear.inputs, outputs = linear.outputs - first < 32 ? linear.outputs - first : 32;
  const bf16 *w = (const bf16 *)linear.weight + (int64_t)first * n;
  bf16 padded[32][32] __attribute__((aligned(64))) = {};
  float sums[32][32] __attribute__((aligned(64))), found[32][32] __attribute__((aligned(64)));
  int lines = 32 * (end - begin), asked = 0, each = lines / ((rows + 31) / 32) + 1;  // of the next 32 outputs' weights
  for (int row = 0; row < rows; row += 32) {
    const bf16 *x = (const bf16 *)inputs.values + (int64_t)row * n, *lower = x + 16 * n;
    for (int some = 0; some < each && asked < lines; some++, asked++)  // their rows aren't contiguous: a processor doesn't prefetch them
      __builtin_prefetch(w + (int64_t)(32 + asked / (end - begin)) * n + 32 * (begin + asked % (end - begin)), 0, 2);
    int more = rows - row > 16;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = begin; i < end; i++) {
      const bf16 *upper = w + 32 * i, *under = upper + (int64_t)16 * n;
      int64_t stride = 2 * n;
      if (outputs < 32) {
        for (int o = 0; o < outputs; o++) __builtin_memcpy(padded[o], w + (int64_t)o * n + 32 * i, 64);
        upper = padded[0], under = padded[16], stride = 64;
      }
      _tile_loadd(4, upper, stride);
      _tile_loadd(6, x + 512 * i, 64);
      _tile_loadd(5, under, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if (more) {
        _tile_loadd(7, lower + 512 * i, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, &sums[0][0], 128);
    _tile_stored(1, &sums[0][16], 128);
    _tile_stored(2, &sums[16][0], 128);
    _tile_stored(3, &sums[16][16], 128);
    int count = rows - row < 32 ? rows - row : 32;
    for (int o = 0; o < 32; o += 16)
      for (int r = 0; r < 32; r += 16) turn16(&sums[o][r], 32, &found[r][o], 32);
    finish(linear, found[0], count, 32, row, first, to);
  }
}
#endif

#ifdef DOT_BF16_BESIDE
// All interleaved rows with 16 outputs from `first` on, by rows of the model's own weights.
static void rows_beside_unit(const Linear &linear, const Inputs &inputs, int rows, int first, const Output &to) {
  int n = linear.inputs, count = linear.outputs - first < 16 ? linear.outputs - first : 16;
  const bf16 *w = (const bf16 *)linear.weight + (int64_t)first * n;
  float found[BESIDE_BF16 * 16];
  for (int row = 0; row < rows; row += BESIDE_BF16) {
    const bf16 *x = (const bf16 *)inputs.values + row * inputs.stride;
    int left = rows - row < BESIDE_BF16 ? rows - row : BESIDE_BF16;
    if (left > 4) dots_of_rows<2, 8>(w, x, n, count, found);
    else if (left > 2) dots_of_rows<4, 4>(w, x, n, count, found);
    else dots_of_rows<8, 2>(w, x, n, count, found);
    finish(linear, found, left, 16, row, first, to);
  }
}
#endif

#ifndef DOT_BF16
// All rows of floats with 16 outputs from `first` on, by rows of the model's own weights.
static void rows_of_floats_unit(const Linear &linear, const float *x, int rows, int first, const Output &to) {
  enum { MOST = LANES == 16 ? 8 : 4 };  // as there are registers
  int n = linear.inputs, count = linear.outputs - first < 16 ? linear.outputs - first : 16;
  const bf16 *w = (const bf16 *)linear.weight + (int64_t)first * n;
  float found[MOST * 16];
  for (int row = 0; row < rows;) {
    const float *at = x + (int64_t)row * n;
    int left = rows - row, done = left >= MOST ? MOST : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    if (done == 8) dots_of_rows<2, MOST>(w, at, n, count, found);
    else if (done == 4) dots_of_rows<2, 4>(w, at, n, count, found);
    else if (done == 2) dots_of_rows<4, 2>(w, at, n, count, found);
    else all_dots(w, n, at, n, count, found);
    finish(linear, found, done, 16, row, first, to);
    row += done;
  }
}
#endif

#ifdef DOT_BF16_BESIDE
// Weights of B blocks of outputs from `first` on, two inputs of each of 16 outputs side by side; zeros where no output is.
template <int B> static void to_pairs(const Linear &linear, int first, bf16 *to) {
  int64_t n = linear.inputs;
  for (int b = 0; b < B; b++) {
    int begin = (first + b) * 16, count = linear.outputs - begin < 16 ? linear.outputs - begin : 16;
    const bf16 *w = (const bf16 *)linear.weight + begin * n;
    bf16 some[16][32] __attribute__((aligned(64))) = {};
    for (int64_t i = 0; i < n; i += 32) {
      for (int o = 0; o < count && count < 16; o++) __builtin_memcpy(some[o], w + o * n + i, 64);
      const bf16 *from = count < 16 ? some[0] : w + i;
      turn16((const float *)from, count < 16 ? 16 : n / 2, (float *)(to + (b * n + i) * 16), 16);
    }
  }
}

// As float_tile, of 8 interleaved rows and weights in pairs. With each 32 inputs some lines of `next` are prefetched: all
// at once they would delay the loads.
template <int B>
static inline void pairs_tile(const bf16 *w, const bf16 *x, int64_t n, const bf16 *next, int lines, float *out) {
  enum { R = BESIDE_BF16, AHEAD = 1024 };  // inputs, which come from a more distant cache than the weights
  vf sums[R][B] = {};
  for (int64_t i = 0; i < n; i += 32, x += 32 * R) {
    for (int line = 0; line < lines; line++, next += 32) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) __builtin_prefetch(x + 32 * r + AHEAD);
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; pair++) {
      __m512bh weights[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) __builtin_memcpy(&weights[b], w + (b * n + i + 2 * pair) * 16, 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t two;
        __builtin_memcpy(&two, x + 32 * r + 2 * pair, 4);
        __m512bh input = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) sums[r][b] = (vf)_mm512_dpbf16_ps((__m512)sums[r][b], weights[b], input);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) store(out + (r * B + b) * 16, sums[r][b]);
}

// Many interleaved rows with B blocks of outputs: the time is bound by computation, not by reading.
template <int B>
static void pairs_of_many_unit(const Linear &linear, const Inputs &inputs, int rows, int first, const Output &to) {
  enum { R = BESIDE_BF16 };
  int64_t n = linear.inputs;
  float found[R * B * 16];
  bf16 *panel = (bf16 *)(inputs.panels + omp_get_thread_num() * inputs.of_panel);
  to_pairs<B>(linear, first, panel);
  // Outputs that are likely to be this thread's next ones are asked for in the last third of the passes: before, the rows
  // that are read would drive them out again.
  int64_t ahead = (first + omp_get_num_threads() * B) * 16, left = ahead + 16 * B <= linear.outputs ? 16 * B : 0;
  int64_t late = ((rows + R - 1) / R + 2) / 3, each = (left + late - 1) / late;
  const bf16 *next = (const bf16 *)linear.weight + ahead * n;
  for (int64_t row = 0; row < rows; row += R) {
    int lines = rows - row > late * R ? 0 : left < each ? left : each;
    for (int r = 0; r < R && row + r < rows; r++)  // what is written and added to
      for (int b = 0; b < B; b++) __builtin_prefetch(to.values + (row + r) * to.stride + (first + b) * 16, 1);
    pairs_tile<B>(panel, (const bf16 *)inputs.values + row * inputs.stride, n, next, lines, found);
    left -= lines, next += lines * n;
    finish(linear, found, rows - row < R ? rows - row : R, B * 16, row, first * 16, to);
  }
}
#endif

#ifndef TILES
// Weights of B blocks of outputs from `first` on as those of `float_tile`, zeros where no output is.
template <int B>
static void to_floats(const Linear &linear, int first, float *to) {
  int n = linear.inputs;
  for (int b = 0; b < B; b++) {
    int begin = (first + b) * 16, count = linear.outputs - begin < 16 ? linear.outputs - begin : 16, i = 0;
    const bf16 *w = (const bf16 *)linear.weight + (int64_t)begin * n;
    float *block = to + (int64_t)b * n * 16;
#if LANES == 16
    for (; i + 16 <= n; i += 16) {
      float some[16][16] __attribute__((aligned(64))) = {};
      for (int o = 0; o < count; o++) store(some[o], load(w + (int64_t)o * n + i));
      turn16(some[0], 16, block + (int64_t)i * 16, 16);
    }
#else
    for (; i + 32 <= n; i += 32) {  // a line of each row in turn: they compete for the same places in a cache
      float some[16][32] __attribute__((aligned(64))) = {};
      for (int o = 0; o < count; o++)
        for (int j = 0; j < 32; j += LANES) store(some[o] + j, load(w + (int64_t)o * n + i + j));
      for (int o = 0; o < 16; o += 8)
        for (int j = 0; j < 32; j += 8) turn8(some[o] + j, 32, block + (int64_t)(i + j) * 16 + o, 16);
    }
#endif
    for (; i < n; i++)
      for (int o = 0; o < 16; o++) block[(int64_t)i * 16 + o] = o < count ? as_float(w[(int64_t)o * n + i]) : 0;
  }
}

// Many rows of floats with B blocks of outputs: bound by computation, so weights are converted to float once.
template <int B>
static void many_rows_unit(const Linear &linear, const float *x, const Inputs &inputs, int rows, int first, const Output &to) {
  enum { R = LANES == 16 ? 12 : 4 };
  float found[R * B * 16], *panel = inputs.panels + omp_get_thread_num() * inputs.of_panel;
  Linear floats = linear;
  floats.weight = panel;
  to_floats<B>(linear, first, panel);
  for (int row = 0; row < rows; row += R) {
    int count = rows - row < R ? rows - row : R;
    float_tile<R, B>(floats, x, row, count, 0, 0, 1, found);
    finish(linear, found, count, B * 16, row, first * 16, to);
  }
}
#endif

#ifdef DOT_BF16
// All rows with 16 outputs, by rows of the model's own weights.
static void row_unit(const Linear &linear, const Inputs &inputs, int rows, int first, const Output &to) {
  const bf16 *w = (const bf16 *)linear.weight, *x = (const bf16 *)inputs.values;
  int n = linear.inputs, count = linear.outputs - first < 16 ? linear.outputs - first : 16;
  for (int row = 0; row < rows; row++) {
    float found[16];
    all_dots(w + (int64_t)first * n, n, x + row * inputs.stride, n, count, found);
    finish(linear, found, 1, 16, row, first, to);
  }
}
#endif

#ifdef TILES
// In parts whose inputs stay in a core's cache while all outputs are computed, unless an activation needs whole sums.
static void project_bf16_tiles(const Linear &linear, const Inputs &inputs, int rows, const Output &to) {
  enum { PART = 64 };  // steps of 32 inputs
  int pairs = (linear.outputs + 31) / 32, chunk = pairs / (8 * omp_get_num_threads()) + 1, steps = linear.inputs / 32;
  int part = to.activation || to.what == MULTIPLY ? steps : PART;
  Linear rest = linear;
  rest.bias = 0;
  for (int begin = 0; begin < steps; begin += part) {
    int end = begin + part < steps ? begin + part : steps;
    Output more = {to.values, to.stride, begin ? ADD : to.what, to.activation};
#pragma omp for schedule(dynamic, chunk)
    for (int pair = 0; pair < pairs; pair++)
      bf16_tiles_unit(begin ? rest : linear, inputs, rows, 32 * pair, begin, end, more);
  }
}
#endif

#ifdef DOT_BF16_BESIDE
// Three blocks of outputs at a time, and the rest in a smaller unit for each thread, so that no thread waits long.
static void project_pairs(const Linear &linear, const Inputs &inputs, int rows, const Output &to) {
  int blocks = (linear.outputs + 15) / 16, threads = omp_get_num_threads(), whole = blocks / (3 * threads) * threads;
  int left = blocks - 3 * whole, each = (left + threads - 1) / threads, units = whole + (left ? (left + each - 1) / each : 0);
#pragma omp for schedule(dynamic, 1)
  for (int unit = 0; unit < units; unit++) {
    int first = unit < whole ? 3 * unit : 3 * whole + (unit - whole) * each, wide = unit < whole ? 3 : each;
    if (blocks - first < wide) wide = blocks - first;
    if (wide == 3) pairs_of_many_unit<3>(linear, inputs, rows, first, to);
    else if (wide == 2) pairs_of_many_unit<2>(linear, inputs, rows, first, to);
    else pairs_of_many_unit<1>(linear, inputs, rows, first, to);
  }
}
#endif

// How many blocks of outputs are multiplied at once: as many as have registers for the sums of their rows. Memory gives
// three streams of weights faster than two, but a few blocks are divided among threads less evenly then.
static inline int blocks_together(const Linear &linear, int rows) {
  if (linear.kind == BFLOAT16) return 2;
  if (LANES < 16) return rows < 4 ? 2 : 1;
  bool many = linear.outputs >= 16 * 16 * omp_get_num_threads();
  if (many && rows <= (linear.kind == INT4 ? 4 : 8)) return 3;
  return linear.kind == INT4 && rows > 4 ? 1 : 2;
}

// Called by every thread of a team; ends with a barrier.
static void project(const Linear &linear, const float *x, const Inputs &inputs, int rows, const Output &to) {
#ifdef TILES
  if (bf16_in_tiles(linear, rows)) return project_bf16_tiles(linear, inputs, rows, to);
#endif
#ifdef DOT_BF16_BESIDE
  if (in_pairs(linear, inputs, rows)) return project_pairs(linear, inputs, rows, to);
#endif
  int blocks = (linear.outputs + 15) / 16, together = blocks_together(linear, rows), units = (blocks + together - 1) / together;
  int chunk = units / (8 * omp_get_num_threads()) + 1;
#pragma omp for schedule(dynamic, chunk)
  for (int unit = 0; unit < units; unit++) {
    int first = together * unit, left = blocks - first, wide = left < together ? left : together, two = wide == 2;
#ifndef TILES
    if (as_floats(linear, inputs, rows)) {
      if (two && LANES == 16) {
        many_rows_unit<2>(linear, x, inputs, rows, first, to);
        continue;
      }
      many_rows_unit<1>(linear, x, inputs, rows, first, to);
      if (two) many_rows_unit<1>(linear, x, inputs, rows, first + 1, to);
      continue;
    }
#endif
#ifdef DOT_BF16_BESIDE
    if (linear.kind == BFLOAT16 && beside(linear, rows) > 1) {
      rows_beside_unit(linear, inputs, rows, first * 16, to);
      if (two) rows_beside_unit(linear, inputs, rows, first * 16 + 16, to);
      continue;
    }
#endif
    if (linear.kind == BFLOAT16) {
#ifdef DOT_BF16
      row_unit(linear, inputs, rows, first * 16, to);
      if (two) row_unit(linear, inputs, rows, first * 16 + 16, to);
#else
      rows_of_floats_unit(linear, x, rows, first * 16, to);
      if (two) rows_of_floats_unit(linear, x, rows, first * 16 + 16, to);
#endif
#ifdef TILES
    } else if (two && linear.kind == INT8 && rows >= 16) {
      int8_tiles_unit(linear, inputs, rows, first, to);
#endif
#ifdef MADD_INT8
    } else if (linear.kind == INT8 && beside(linear, rows) > 1) {
      pairs_unit(linear, inputs, rows, first, to);
#endif
#if LANES == 16
    } else if (wide == 3) {
      block_unit<3>(linear, x, inputs, rows, first, to);
#endif
    } else if (two) {
      block_unit<2>(linear, x, inputs, rows, first, to);
    } else {
      block_unit<1>(linear, x, inputs, rows, first, to);
    }
  }
}

// ---- packed copies of weights

// 32 inputs of a row of weights as floats, zeros beyond the last.
template <class T> static inline void read32(const T *from, int count, float *to) {
  if (count >= 32) {
    for (int j = 0; j < 32; j += LANES) store(to + j, load(from + j));
    return;
  }
  for (int j = 0; j < 32; j++) to[j] = j < count ? as_float(from[j]) : 0.0f;
}

// 32 values over a scale, rounded to the nearest integers, ties to even.
static inline void steps32(const float *values, float scale, int32_t *to) {
  for (int j = 0; j < 32; j += LANES) {
    vi rounded = (vi)(load(values + j) / all(scale) + 12582912.0f) - 0x4b400000;  // according to the bits that are cut off
    __builtin_memcpy(to + j, &rounded, sizeof rounded);
  }
}

static inline float greatest32(const float *values) {
  vf most = {};
  for (int j = 0; j < 32; j += LANES) {
    vf v = load(values + j);
    most = larger(most, larger(v, -v));
  }
  return greatest(most);
}

// Row o of a block in 8 bits with one scale, its largest value at 127 steps.
template <class T> static void pack_row_8(const Linear &linear, const T *from, int n, int o, uint8_t *to, float *scale) {
  int padded = padded_inputs(linear);
  float values[32], largest = 0;
  for (int i = 0; i < n; i += 32) {
    read32(from + i, n - i, values);
    float most = greatest32(values);
    largest = most > largest ? most : largest;
  }
  scale[o] = largest / 127 > 1e-30f ? largest / 127 : 1e-30f;  // as of round_to_8_bits
  for (int i = 0; i < padded; i += 32) {
    int32_t steps[32];
    read32(from + i, n - i, values);
    steps32(values, scale[o], steps);
    for (int j = 0; j < 32; j += 4) {
      uint8_t four[4];
      for (int k = 0; k < 4; k++) four[k] = (uint8_t)(steps[j + k] + 128);
      __builtin_memcpy(to + (int64_t)(i + j) * 16 + 4 * o, four, 4);
    }
  }
}

// Row o of a block in 4 bits, each group of inputs with a scale by which the value of the largest magnitude becomes -8, so
// that all 16 values are used.
template <class T> static void pack_row_4(const Linear &linear, const T *from, int n, int o, uint8_t *to, bf16 *scales) {
  int padded = padded_inputs(linear);
  for (int i = 0, g = 0; i < padded; i += GROUP, g++) {
    float values[32];
    read32(from + i, n - i, values);
    float most = greatest32(values), largest = 0;
    for (int j = 31; j >= 0; j--)
      if (values[j] == most || values[j] == -most) largest = values[j];
    bf16 scale = scales[16 * g + o] = rounded_bf16(largest / -8);
    int32_t steps[32] = {};
    if (as_float(scale) != 0) steps32(values, as_float(scale), steps);
    for (int pair = 0; pair < 4; pair++)
      for (int k = 0; k < 4; k++) {
        int low = steps[8 * pair + k] + 8, high = steps[8 * pair + 4 + k] + 8;
        low = low < 0 ? 0 : low > 15 ? 15 : low, high = high < 0 ? 0 : high > 15 ? 15 : high;
        to[((4 * g + pair) * 16 + o) * 4 + k] = (uint8_t)(low | high << 4);
      }
  }
}

// A block of 16 outputs in the layout of the products, from weights [outputs][inputs]; outputs beyond the last are 0.
template <class T> static void pack_block(const Linear &linear, const T *from, int block) {
  int n = linear.inputs;
  int64_t padded = padded_inputs(linear);
  uint8_t *bytes = (uint8_t *)linear.weight + block * padded * (linear.kind == INT8 ? 16 : 8);
  bf16 *scales = (bf16 *)linear.scale + block * (padded / GROUP) * 16;
  float *floats = (float *)linear.weight + (int64_t)block * n * 16;
  for (int o = 0; o < 16; o++) {
    int output = 16 * block + o, count = output < linear.outputs ? n : 0;
    const T *row = from + (int64_t)(count ? output : 0) * n;
    if (linear.kind == INT8) pack_row_8(linear, row, count, o, bytes, (float *)linear.scale + 16 * block);
    else if (linear.kind == INT4) pack_row_4(linear, row, count, o, bytes, scales);
    else
      for (int i = 0; i < n; i++) floats[(int64_t)i * 16 + o] = i < count ? as_float(row[i]) : 0.0f;
  }
}

// Write a packed copy of weights of some type to the memory of `linear`.
static void pack(const Linear &linear, const void *from, int type, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int block = 0; block < (linear.outputs + 15) / 16; block++)
    if (type == FLOAT32) pack_block(linear, (const float *)from, block);
    else pack_block(linear, (const bf16 *)from, block);
}

// ---- attention

static void rotate(float *head, const float *cos, const float *signed_sin, int rotated) {
  float turned[MOST_HEAD_DIM];
  int half = rotated / 2;
  for (int i = 0; i < rotated; i++) turned[i] = head[i] * cos[i] + head[i < half ? i + half : i - half] * signed_sin[i];
  __builtin_memcpy(head, turned, 4 * rotated);
}

static inline void write(float *to, const float *from, int n) { __builtin_memcpy(to, from, 4 * n); }
static inline void write(bf16 *to, const float *from, int n) {
  for (int i = 0; i < n; i++) to[i] = rounded_bf16(from[i]);
}

// Softmax of scores except for a factor, which is returned. Up to a register beyond the scores is overwritten.
static inline float soften(float *scores, int count) {
  for (int i = count; i < (count + LANES - 1) / LANES * LANES; i++) scores[i] = -1e30f;
  vf largest = load(scores);
  for (int i = LANES; i < count; i += LANES) largest = larger(largest, load(scores + i));
  float most = greatest(largest);
  vf sum = {};
  for (int i = 0; i < count; i += LANES) {
    vf e = exponential(load(scores + i) - most);
    store(scores + i, e);
    sum += e;
  }
  return 1.0f / total(sum);
}

// Prefetch a few columns ahead: the keys and values of a head are too short for a processor's own prefetching.
template <class T> static inline void ask(const T *p, int n) {
  enum { AHEAD = 4096, LINE = 64 / sizeof(T) };
#pragma GCC unroll 8
  for (int i = 0; i < n; i += LINE) __builtin_prefetch((const char *)(p + i) + AHEAD);
}

// Products of a query with `count` keys.
template <class T, class X>
static inline void all_scores(const T *keys, const X *query, int dim, int count, float *scores) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    ask(keys + (int64_t)i * dim, 8 * dim);
    dots<8>(keys + (int64_t)i * dim, dim, query, dim, scores + i);
  }
  for (; i < count; i++) dots<1>(keys + (int64_t)i * dim, dim, query, dim, scores + i);
}

// One query head: softmax(q k / scale + bias) v of the columns [start, end).
template <class T>
static void attend(const float *query, const T *keys, const T *values, const float *bias, int start, int end, int dim,
                   float *scores, float *out) {
  int count = end - start;
  keys += (int64_t)start * dim;
  values += (int64_t)start * dim;
#ifdef DOT_BF16
  if constexpr (sizeof(T) == 2) {
    bf16 rounded[MOST_HEAD_DIM];
    write(rounded, query, dim);
    all_scores(keys, rounded, dim, count, scores);
  } else
#endif
    all_scores(keys, query, dim, count, scores);
  if (bias)
    for (int i = 0; i < count; i++) scores[i] += bias[start + i];
  float factor = soften(scores, count);
  int d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) {
    vf a = {}, b = {}, e = {}, f = {};
    for (int i = 0; i < count; i++) {
      const T *v = values + (int64_t)i * dim + d;
      float share = scores[i];
      ask(v, 4 * LANES);
      a += share * load(v);
      b += share * load(v + LANES);
      e += share * load(v + 2 * LANES);
      f += share * load(v + 3 * LANES);
    }
    store(out + d, a * factor);
    store(out + d + LANES, b * factor);
    store(out + d + 2 * LANES, e * factor);
    store(out + d + 3 * LANES, f * factor);
  }
  for (; d + LANES <= dim; d += LANES) {
    vf sums[4] = {};
    int i = 0;
    for (; i + 4 <= count; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) sums[j] += scores[i + j] * load(values + (int64_t)(i + j) * dim + d);
    for (; i < count; i++) sums[0] += scores[i] * load(values + (int64_t)i * dim + d);
    store(out + d, ((sums[0] + sums[1]) + (sums[2] + sums[3])) * factor);
  }
  for (; d < dim; d++) {
    float a = 0;
    for (int i = 0; i < count; i++) a += scores[i] * as_float(values[(int64_t)i * dim + d]);
    out[d] = a * factor;
  }
}

// Keys [columns][dim] up to column `end`, transposed to [dim][stride].
template <class T> static void turn(const T *keys, int end, int dim, float *to, int64_t stride) {
  for (int d = 0; d < dim; d++)
    for (int c = 0; c < end; c++) to[d * stride + c] = as_float(keys[(int64_t)c * dim + d]);
}

// W vectors of values, weighted by the scores of `TOGETHER` queries, times the factor of each query.
template <int W, class T>
static inline void weigh(const float *scores, int64_t stride, const T *values, int dim, int begin, int end, int d,
                         const float *factors, float *const *out) {
  vf sums[TOGETHER][W] = {};
  for (int i = begin; i < end; i++) {
    vf v[W];
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) v[j] = load(values + (int64_t)i * dim + d + j * LANES);
#pragma GCC unroll 4
    for (int q = 0; q < TOGETHER; q++)
#pragma GCC unroll 4
      for (int j = 0; j < W; j++) sums[q][j] += scores[q * stride + i] * v[j];
  }
  for (int q = 0; q < TOGETHER; q++)
    for (int j = 0; j < W; j++) store(out[q] + d + j * LANES, sums[q][j] * factors[q]);
}

// As `attend`, of `TOGETHER` queries of one head, whose first and last columns ascend. Keys are transposed.
template <class T>
static void attend_together(const float *const *queries, const float *keys, int64_t stride, const T *values,
                            const float *bias, const int *starts, const int *ends, int dim, float *scores,
                            float *const *out) {
  int begin = starts[0], end = ends[TOGETHER - 1];
  for (int c = begin / LANES * LANES; c < end; c += 2 * LANES) {
    vf sums[TOGETHER][2] = {};
    for (int d = 0; d < dim; d++) {
      vf a = load(keys + d * stride + c), b = load(keys + d * stride + c + LANES);
#pragma GCC unroll 4
      for (int q = 0; q < TOGETHER; q++) {
        sums[q][0] += queries[q][d] * a;
        sums[q][1] += queries[q][d] * b;
      }
    }
    for (int q = 0; q < TOGETHER; q++) {
      store(scores + q * stride + c, sums[q][0]);
      store(scores + q * stride + c + LANES, sums[q][1]);
    }
  }
  float factors[TOGETHER];
  for (int q = 0; q < TOGETHER; q++) {
    float *s = scores + q * stride;
    int from = starts[q], to = ends[q];
    if (bias)
      for (int i = from; i < to; i++) s[i] += bias[i];
    factors[q] = soften(s + from, to - from);
    for (int i = begin; i < from; i++) s[i] = 0;
    for (int i = to; i < end; i++) s[i] = 0;
  }
  enum { WIDE = LANES == 16 ? 4 : 2 };
  int d = 0;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
    weigh<WIDE>(scores, stride, values, dim, begin, end, d, factors, out);
  for (; d + LANES <= dim; d += LANES) weigh<1>(scores, stride, values, dim, begin, end, d, factors, out);
  for (; d < dim; d++)
    for (int q = 0; q < TOGETHER; q++) {
      float a = 0;
      for (int i = begin; i < end; i++) a += scores[q * stride + i] * as_float(values[(int64_t)i * dim + d]);
      out[q][d] = a * factors[q];
    }
}

template <class T> struct Heads {
  enum { MOST_ASKED = 8192 };  // bytes of one head's keys or values
  const Block &block;
  const Step &step;
  const Layer &layer;
  float *qkv;
  int width;

  float *head(int token, int part, int n) const {  // part: 0 queries, 1 keys, 2 values
    float *row = qkv + (int64_t)token * width;
    if (block.interleaved) return row + (3 * n + part) * block.head_dim;
    int before = part == 0 ? 0 : part == 1 ? block.heads : block.heads + block.kv_heads;
    return row + (before + n) * block.head_dim;
  }
  T *at(void *cache, int token, int kv, int column) const {
    return (T *)cache + step.row[token] * layer.row_stride + kv * layer.head_stride + (int64_t)column * block.head_dim;
  }
  // Its queries, where they are needed; its key and value go into the cache.
  void place(int token, int kv, bool asked = true) const {
    const float *cos = step.cos + (int64_t)token * step.rotary_stride, *sin = step.sin + (int64_t)token * step.rotary_stride;
    int group = block.heads / block.kv_heads;
    for (int n = asked ? 0 : group; n <= group; n++) {
      float *h = n < group ? head(token, 0, kv * group + n) : head(token, 1, kv);
      const Norm &norm = n < group ? block.query_norm : block.key_norm;
      if (norm.kind) norm_row(norm, h, h, block.head_dim);
      if (step.rotated) rotate(h, cos, sin, step.rotated);
      if (n < group)
        for (int i = 0; i < block.head_dim; i++) h[i] *= block.scaling;
    }
    write(at(layer.keys, token, kv, step.column[token]), head(token, 1, kv), block.head_dim);
    write(at(layer.values, token, kv, step.column[token]), head(token, 2, kv), block.head_dim);
  }
  const float *bias(int token, int h) const {
    return step.bias ? step.bias + step.row[token] * step.bias_row_stride + h * step.bias_head_stride : 0;
  }
  int start(int token) const {  // the first column that it attends to
    int end = step.column[token] + 1;
    return block.window && end > block.window ? end - block.window : 0;
  }
  float *place_of(float *out, int token, int h) const { return out + ((int64_t)token * block.heads + h) * block.head_dim; }
  void run_head(int token, int h, float *scores, float *out) const {
    int kv = h / (block.heads / block.kv_heads);
    attend(head(token, 0, h), at(layer.keys, token, kv, 0), at(layer.values, token, kv, 0), bias(token, h), start(token),
           step.column[token] + 1, block.head_dim, scores, out);
  }
  // Always inlined: gcc drops calls of a function that only prefetches.
  __attribute__((always_inline)) void ask_for(void *cache, int token, int kv) const {
    const char *from = (const char *)at(cache, token, kv, start(token)), *end = (const char *)at(cache, token, kv, step.column[token]);
    if (step.tokens == 1 || end - from > MOST_ASKED) {  // it is in a cache, or the processor prefetches it
      for (; from < end; from += 4096) __builtin_prefetch(from);
      __builtin_prefetch(end);
      return;
    }
    for (; from < end; from += 64) __builtin_prefetch(from, 0, 2);
    __builtin_prefetch(end, 0, 2);
  }
  void run(int token, int kv, float *scores, float *out, int to) const {
    int group = block.heads / block.kv_heads;
    ask_for(layer.keys, token, kv + 1);
    ask_for(layer.values, token, kv + 1);
    for (int h = kv * group; h < kv * group + group; h++) run_head(token, h, scores, place_of(out, to, h));
  }
  // One head of all tokens of a text of a prompt.
  void run_text(int text, int h, float *scores, int64_t stride, float *out) const {
    int token = text ? step.last[text - 1] + 1 : 0, end = step.last[text] + 1, kv = h / (block.heads / block.kv_heads);
    float *turned = scores + TOGETHER * stride;
    const T *values = at(layer.values, token, kv, 0);
    if (end - token >= TOGETHER)
      turn(at(layer.keys, token, kv, 0), step.column[end - 1] + 1, block.head_dim, turned, stride);
    for (; token + TOGETHER <= end; token += TOGETHER) {
      const float *queries[TOGETHER];
      float *outs[TOGETHER];
      int starts[TOGETHER], ends[TOGETHER];
      for (int q = 0; q < TOGETHER; q++) {
        queries[q] = head(token + q, 0, h), outs[q] = place_of(out, token + q, h);
        starts[q] = start(token + q), ends[q] = step.column[token + q] + 1;
      }
      attend_together(queries, turned, stride, values, bias(token, h), starts, ends, block.head_dim, scores, outs);
    }
    for (; token < end; token++) run_head(token, h, scores, place_of(out, token, h));
  }
};

// Attention of all tokens, or of those in `last`: out [tokens, heads * head_dim]. All keys and values are in the cache.
// Called by every thread of a team; ends with a barrier.
template <class T>
static void attention(const Heads<T> &heads, const int32_t *last, int count, float *scores, int64_t stride, float *out) {
  int kv_heads = heads.block.kv_heads, all = heads.block.heads, tokens = heads.step.tokens;
  if (heads.step.one_token_a_row) {
#pragma omp for schedule(dynamic, 1 + kv_heads / 4)
    for (int task = 0; task < tokens * kv_heads; task++) {
      heads.place(task / kv_heads, task % kv_heads);
      heads.run(task / kv_heads, task % kv_heads, scores, out, task / kv_heads);
    }
  } else {
#pragma omp for schedule(static)
    for (int task = 0; task < tokens * kv_heads; task++) {
      int token = task / kv_heads;
      // The tokens of one text follow those of another: the last token of each is where the row changes.
      bool ends = token + 1 == tokens || heads.step.row[token] != heads.step.row[token + 1];
      heads.place(token, task % kv_heads, !last || ends);
    }
    if (heads.step.last && !last) {
#pragma omp for schedule(dynamic)
      for (int task = 0; task < heads.step.last_count * all; task++)
        heads.run_text(task / all, task % all, scores, stride, out);
      return;
    }
#pragma omp for schedule(dynamic, 1 + kv_heads / 4)
    for (int task = 0; task < count * kv_heads; task++)
      heads.run(last ? last[task / kv_heads] : task / kv_heads, task % kv_heads, scores, out, task / kv_heads);
  }
}

// ---- layers

static inline void begin_team() {
#ifdef TILES
  configure_tiles();
#endif
}

static inline void end_team() {
#ifdef TILES
  _tile_release();
#endif
}

static void prepare(const Linear &linear, const float *x, const Inputs &inputs, int rows) {
  if (linear.kind == FLOAT32 || as_floats(linear, inputs, rows)) return;
#ifdef TILES
  if (bf16_in_tiles(linear, rows)) {
#pragma omp for schedule(static)
    for (int row = 0; row < rows; row += 16) prepare_tiles(linear, x, inputs, row, rows);
    return;
  }
#endif
  int together = beside(linear, rows) > 1 ? 4 : 1;  // no two threads write to a line of 64 bytes
#pragma omp for schedule(static)
  for (int first = 0; first < rows; first += together)
    for (int row = first; row < rows && row < first + together; row++)
      prepare_row(linear, x + (int64_t)row * linear.inputs, inputs, row, rows);
}

static void normalise(const Norm &norm, const float *x, float *y, int rows, int n) {
#pragma omp for schedule(static)
  for (int row = 0; row < rows; row++) norm_row(norm, x + (int64_t)row * n, y + (int64_t)row * n, n);
}

static void gather(float *to, const float *rows, const int32_t *at, int count, int n) {
  for (int i = 0; i < count; i++) __builtin_memmove(to + (int64_t)i * n, rows + (int64_t)at[i] * n, 4 * n);
}

// Outputs [from, to) of a projection; `from` is a multiple of 16.
static Linear part_of(const Linear &linear, int from, int to) {
  Linear part = linear;
  int64_t inputs = padded_inputs(linear);
  part.outputs = to - from;
  if (linear.bias) part.bias += from;
  if (linear.kind == INT8) part.scale += from;
  if (linear.kind == INT4) part.scale = (const float *)((const bf16 *)linear.scale + from * inputs / GROUP);
  part.weight = (const char *)linear.weight + (linear.kind == INT4 ? from * inputs / 2
                                                                   : from * inputs * (linear.kind == FLOAT32    ? 4
                                                                                      : linear.kind == BFLOAT16 ? 2
                                                                                                                : 1));
  return part;
}

// Queries, keys and values [rows][width] of `x`; with `last`, queries of these rows alone.
static void project_heads(const Block &block, const float *x, const Step &step, const Buffers &buffers, int width,
                          const int32_t *last) {
  int rows = step.tokens, n = step.hidden_size, queries = block.heads * block.head_dim, count = step.last_count;
  const Linear &first = block.qkv[0];
  bool together = block.projections == 1;
  if (last && !block.interleaved && (!together || queries % 16 == 0)) {
    Linear asked = together ? part_of(first, 0, queries) : first;
#pragma omp single
    gather(buffers.alone, x, last, count, n);
    prepare(asked, buffers.alone, buffers.inputs, count);
    project(asked, buffers.alone, buffers.inputs, count, {buffers.attended, queries, STORE, NO_ACTIVATION});
#pragma omp single
    for (int i = 0; i < count; i++)
      __builtin_memcpy(buffers.qkv + (int64_t)last[i] * width, buffers.attended + (int64_t)i * queries, 4 * queries);
  } else {
    last = 0;
  }
  prepare(first, x, buffers.inputs, rows);
  if (together && last)
    project(part_of(first, queries, first.outputs), x, buffers.inputs, rows,
            {buffers.qkv + queries, width, STORE, NO_ACTIVATION});
  for (int i = 0, at = 0; i < block.projections && !(together && last); at += block.qkv[i++].outputs)
    if (i || !last) project(block.qkv[i], x, buffers.inputs, rows, {buffers.qkv + at, width, STORE, NO_ACTIVATION});
}

// With `last`, only these tokens run the rest of the layer; the others only store keys and values.
static void run_layer(const Block &block, const Step &step, const Layer &layer, const Buffers &buffers, float *scores,
                      const int32_t *last) {
  int rows = step.tokens, n = step.hidden_size, width = 0;
  float *hidden = buffers.hidden, *normed = hidden, *feed = 0;
  const Inputs &inputs = buffers.inputs;
  if (block.norm_first) normalise(block.attention_norm, hidden, normed = buffers.normed, rows, n);
  if (block.parallel) {
    feed = normed;
    if (block.mlp_norm.kind) normalise(block.mlp_norm, hidden, feed = buffers.feed, rows, n);
  }
  for (int i = 0; i < block.projections; i++) width += block.qkv[i].outputs;
  project_heads(block, normed, step, buffers, width, last);
  int going = last ? step.last_count : rows;
  if (step.cache_type == FLOAT32)
    attention(Heads<float>{block, step, layer, buffers.qkv, width}, last, going, scores, buffers.columns, buffers.attended);
  else
    attention(Heads<bf16>{block, step, layer, buffers.qkv, width}, last, going, scores, buffers.columns, buffers.attended);
  if (last) {
#pragma omp single
    {
      gather(buffers.alone, hidden, last, going, n);
      if (block.parallel) gather(feed, feed, last, going, n);
    }
    hidden = buffers.alone;
    rows = going;
  }
  prepare(block.out, buffers.attended, inputs, rows);
  project(block.out, buffers.attended, inputs, rows, {hidden, n, ADD, NO_ACTIVATION});
  if (!block.norm_first) normalise(block.attention_norm, hidden, hidden, rows, n);
  if (!block.parallel) {
    feed = hidden;
    if (block.norm_first) normalise(block.mlp_norm, hidden, feed = buffers.feed, rows, n);
  }
  int inner = block.up.outputs;
  prepare(block.up, feed, inputs, rows);
  if (block.gate.outputs) {
    project(block.gate, feed, inputs, rows, {buffers.inner, inner, STORE, block.activation});
    project(block.up, feed, inputs, rows, {buffers.inner, inner, MULTIPLY, NO_ACTIVATION});
  } else {
    project(block.up, feed, inputs, rows, {buffers.inner, inner, STORE, block.activation});
  }
  prepare(block.down, buffers.inner, inputs, rows);
  project(block.down, buffers.inner, inputs, rows, {hidden, n, ADD, NO_ACTIVATION});
  if (!block.norm_first) normalise(block.mlp_norm, hidden, hidden, rows, n);
  if (last) {
#pragma omp single
    for (int i = 0; i < going; i++) __builtin_memcpy(buffers.hidden + (int64_t)last[i] * n, hidden + (int64_t)i * n, 4 * n);
  }
}

template <class T> static void embed_row(const Step &step, int row, float *to) {
  int n = step.hidden_size;
  const T *token = (const T *)step.embedding + step.token_ids[row] * n;
  for (int i = 0; i < n; i++) to[i] = as_float(token[i]);
  if (!step.positions) return;
  const T *position = (const T *)step.positions + step.position_ids[row] * n;
  for (int i = 0; i < n; i++) to[i] += as_float(position[i]);
}

static void embed(const Step &step, float *hidden) {
#pragma omp for schedule(static)
  for (int row = 0; row < step.tokens; row++) {
    float *to = hidden + (int64_t)row * step.hidden_size;
    if (step.cache_type == FLOAT32) embed_row<float>(step, row, to);
    else embed_row<bf16>(step, row, to);
  }
}

static void run_step(const Step &step, const Buffers &buffers) {
#pragma omp parallel num_threads(step.threads) if (step.threads > 1)
  {
    begin_team();
    if (step.token_ids) embed(step, buffers.hidden);
    float *scores = buffers.scores + (int64_t)omp_get_thread_num() * buffers.of_thread;
    Step of_layer = step;
    for (int i = 0; i < step.layer_count; i++) {
      const Layer &layer = step.layers[step.running[i]];
      if (step.layer_tokens) {
        of_layer.tokens = step.layer_tokens[i];
        of_layer.row = step.layer_rows + (int64_t)i * step.tokens;
      }
      run_layer(*layer.block, of_layer, layer, buffers, scores, i < step.stop ? 0 : step.last);
    }
    int rows = step.last ? step.last_count : step.tokens;
    const float *read = step.last ? buffers.alone : buffers.hidden;
    if (step.logits) {
      if (step.final_norm->kind) {
        normalise(*step.final_norm, read, buffers.normed, rows, step.hidden_size);
        read = buffers.normed;
      }
      prepare(*step.head, read, buffers.inputs, rows);
      project(*step.head, read, buffers.inputs, rows, {step.logits, step.head->outputs, STORE, NO_ACTIVATION});
    }
    end_team();
  }
}

// For each row of logits the place of the largest, the first of several that the model's type doesn't tell apart, or of the
// first that is no number; and its probability.
static void choose(const float *logits, int rows, int n, int rounded, int threads, int64_t *found, float *probability) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
  for (int row = 0; row < rows; row++) {
    enum { PART = 16 * LANES };
    const float *x = logits + (int64_t)row * n;
    int at = 0;
    float best = -__builtin_inff();
    for (int start = 0; start < n; start += PART) {
      int end = start + PART < n ? start + PART : n, i = start;
      vf most = all(best);
      vi odd = {};
      for (; i + LANES <= end; i += LANES) {
        vf v = load(x + i);
        odd |= v != v;
        most = larger(v, most);
      }
      float largest = greatest(most);
      int strange = 0;
      for (int j = 0; j < LANES; j++) strange |= odd[j];
      for (; i < end; i++) {
        strange |= x[i] != x[i];
        largest = x[i] > largest ? x[i] : largest;
      }
      if (strange) {
        for (at = start; x[at] == x[at];) at++;
        best = x[at];
        break;
      }
      if (rounded) largest = as_float(rounded_bf16(largest));
      if (largest > best) {
        best = largest;
        for (at = start; (rounded ? as_float(rounded_bf16(x[at])) : x[at]) != best;) at++;
      }
    }
    found[row] = at;
    if (!probability) continue;
    vf sum = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sum += exponential(load(x + i) - best);
    float rest = total(sum);
    for (; i < n; i++) rest += exponential(all(x[i] - best))[0];
    probability[row] = 1.0f / rest;
  }
}

static void run_linear(const Linear &linear, const float *x, int rows, int threads, const Buffers &buffers, float *y) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    begin_team();
    prepare(linear, x, buffers.inputs, rows);
    project(linear, x, buffers.inputs, rows, {y, linear.outputs, STORE, NO_ACTIVATION});
    end_team();
  }
}

}  // namespace ISA
#undef SHIFTED_BACK
#undef GROUPS_IN_16_BITS
#undef DOT_BF16_BESIDE
