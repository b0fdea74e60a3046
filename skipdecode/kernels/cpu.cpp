// Decode steps and prompts on a CPU: all layers in one call, each weight read once from memory. The layers are those of
// skipdecode/fastpath/layer.py, which is the reference. Weights are the model's own in float32 or bfloat16, or packed
// copies in 8 or 4 bits. Sums are in float32, in an order that doesn't depend on the other rows, so that a row of a batch
// gives the same bits as it does alone; but more than 16 rows in bfloat16 have an order of their own
// (docs/decisions/0018-compiled-kernels.md).

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

struct bf16 { uint16_t bits; };
static inline float as_float(float x) { return x; }
static inline float as_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

enum Kind { FLOAT32, BFLOAT16, INT8, INT4 };
enum NormKind { NO_NORM, LAYER_NORM, RMS_NORM };
enum Activation { NO_ACTIVATION, RELU, SILU, GELU_TANH, GELU };
enum What { STORE, ADD, MULTIPLY };
enum { GROUP = 32, MOST_HEAD_DIM = 512 };
enum { FEW_ROWS = 16 };  // for more, bfloat16 weights are converted to float once for all rows
enum { BESIDE = 12, BESIDE_16 = 4, BESIDE_BF16 = 8 };  // rows that are interleaved: in 8 and 4 bits, in 16 bits, in bfloat16
enum { TOGETHER = 4 };  // queries of a prompt for which each key and value is read once

extern "C" {  // as skipdecode/kernels/cpu.py declares them
struct Linear { const void *weight; const float *scale; const float *bias; int32_t inputs, outputs, kind; };
struct Norm { const float *weight, *bias; float eps; int32_t kind; };
struct Block {
  Norm attention_norm, mlp_norm, query_norm, key_norm;
  Linear qkv[3], out, gate, up, down;
  int32_t projections, heads, kv_heads, head_dim, interleaved, window, activation, parallel, norm_first;
  float scaling;
};
struct Layer { const Block *block; void *keys, *values; int64_t row_stride, head_stride; };
struct Step {
  const Layer *layers;     // of the model
  const int32_t *running;  // those of them that run, ascending
  const Norm *final_norm;
  const Linear *head;
  float *hidden, *logits;
  const void *embedding, *positions;  // the model's tables; where given, hidden is filled from them
  const int64_t *token_ids, *position_ids;
  int64_t token_count, position_count;  // rows of the tables
  const int32_t *row, *column, *last;
  const float *cos, *sin, *bias;
  int64_t bias_row_stride, bias_head_stride;
  int64_t stop;  // with `last`: layers that all tokens run; above them only the last tokens run
  // Where each layer runs the first tokens only: how many, and their rows in the cache [layer_count][tokens].
  const int32_t *layer_tokens, *layer_rows;
  int32_t layer_count, tokens, hidden_size, threads, cache_type, one_token_a_row, rotated, rotary_stride, last_count;
};
// Several steps of greedy decoding. A Step holds what they have in common, and the first token of each sequence ("text"
// in these sources).
struct Greedy {
  const int32_t *const *running;  // of each step
  const int32_t *layer_counts;
  const int64_t *position_ids;  // [tokens][texts]
  int64_t rotary_token;         // distance from a token's cosines and sines to those of the next token of its text
  const int64_t *ends;          // tokens that end a text
  const int32_t *most;          // the maximum number of tokens of each text
  int64_t *chosen;              // out: [tokens][texts]
  int32_t *counts;              // out: the number of tokens of each text
  int32_t steps, end_count;
};
// Rounds of drafts, by layers and an LM head of their own: drafts need not be exact.
struct Drafts {
  const Layer *layers;
  const Linear *head;
  const int32_t *all_running;
  // When drafting stops: step i of a text runs where the product of its drafts' acceptance rates (shares) is larger than
  // worth[i]. bounds are upper bounds of bins of a draft's probability, and shares are the acceptance rates of the bins.
  const float *worth, *bounds, *shares;
  float *probabilities;         // out: of the drafts [rounds][steps][texts]
  int32_t *drafted, *agreed;    // out: [rounds][texts], drafts and accepted drafts; agreed is -1 where the text had ended
  int32_t all_count, kinds, rounds;
};
}

struct Inputs { void *values; float *scales, *panels; int32_t *shifts; int64_t stride, groups, of_panel; bool by_floats; };
struct Output { float *values; int64_t stride; int what, activation; };
struct Buffers { float *hidden, *alone, *normed, *feed, *qkv, *attended, *inner, *scores; int64_t columns, of_thread; Inputs inputs; };

static inline int padded_inputs(const Linear &linear) {
  int to = linear.kind == INT4 ? GROUP : linear.kind == INT8 ? 64 : 1;
  return (linear.inputs + to - 1) / to * to;
}

#if defined(__x86_64__)
#define LANES 16
#define DOT_INT8
#define DOT_BF16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma,avx2,amx-tile,amx-int8,amx-bf16")
#define ISA amx
#define TILES
#include "cpu_isa.h"
#undef ISA
#undef TILES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma,avx2")
#define ISA avx512_bf16
#include "cpu_isa.h"
#undef ISA
#undef DOT_BF16
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,avx2")
#define ISA avx512_vnni
#include "cpu_isa.h"
#undef ISA
#undef DOT_INT8
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define ISA avx2
#define LANES 8
#define MADD_INT8
#include "cpu_isa.h"
#undef ISA
#undef MADD_INT8
#undef LANES
#pragma GCC pop_options
#endif
#define ISA generic
#define LANES 8
#include "cpu_isa.h"

struct Set { const char *name; void (*run_step)(const Step &, const Buffers &); void (*run_linear)(const Linear &, const float *, int, int, const Buffers &, float *); void (*choose)(const float *, int, int, int, int, int64_t *, float *); void (*pack)(const Linear &, const void *, int, int); bool by_floats; };
#define SET(name) {#name, name::run_step, name::run_linear, name::choose, name::pack, false}
static const Set SETS[] = {
#if defined(__x86_64__)
    SET(amx), {"avx512_fp16", avx512_bf16::run_step, avx512_bf16::run_linear, avx512_bf16::choose, avx512_bf16::pack, true}, SET(avx512_bf16),
    SET(avx512_vnni), SET(avx2),
#endif
    SET(generic),
};

#if defined(__x86_64__)
static int has_fp16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 23 & 1);
}

// A process must ask Linux for the tile registers.
static int may_use_tiles() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx >> 22 & 1) || !(edx >> 24 & 1) || !(edx >> 25 & 1))
    return 0;  // of bfloat16, at all, of int8
#if defined(__linux__)
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
  return 0;
#endif
}
#endif

static int has(int set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (set == 0) return wide && __builtin_cpu_supports("avx512bf16") && may_use_tiles();
  // On Intel's processors with tiles, even if these are disabled, other bfloat16 products are half as fast as float ones.
  if (set == 1) return wide && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("intel") && has_fp16();
  if (set == 2) return wide && __builtin_cpu_supports("avx512bf16");
  if (set == 3) return wide;
  if (set == 4) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return 1;
}

// Memory of a thread, kept between calls.
struct Scratch {
  char *memory = 0;
  int64_t size = 0, used = 0;
  ~Scratch() { free(memory); }
  void need(int64_t bytes) {
    used = 0;
    if (bytes <= size) return;
    free(memory);
    memory = (char *)aligned_alloc(64, size = (bytes + 4095) / 4096 * 4096);
    if (!memory) abort();
  }
  template <class T> T *take(int64_t count) {
    T *at = (T *)(memory + used);
    used += (count * sizeof(T) + 63) / 64 * 64;
    return at;
  }
};
static thread_local Scratch scratch, of_texts, of_drafts;

static void widest(const Linear &linear, Inputs &inputs) {
  int64_t padded = (padded_inputs(linear) + 63) / 64 * 64;
  if (padded > inputs.stride) inputs.stride = padded;
  if (padded / GROUP > inputs.groups) inputs.groups = (padded / GROUP + 3) / 4 * 4;
  if (linear.kind == BFLOAT16 && 32 * padded > inputs.of_panel) inputs.of_panel = 32 * padded;
}

// The size in floats of each thread's converted bfloat16 weights of 32 outputs, for many rows.
static int64_t panels(const Inputs &inputs, int64_t rows, int threads) { return rows > FEW_ROWS ? threads * inputs.of_panel : 0; }

// The number of rows rounded up: tiles and interleaved rows are read whole.
static int64_t rows_read(int64_t rows) { return (rows + BESIDE + 31) / 32 * 32; }

static int64_t bytes_of(const Inputs &inputs, int64_t rows, int threads) {
  return rows_read(rows) * (inputs.stride * 2 + 4 + inputs.groups * 4) + 4 * panels(inputs, rows, threads) + 320;
}

static void lay_out(Inputs &inputs, int64_t rows, int threads) {
  inputs.panels = scratch.take<float>(panels(inputs, rows, threads));
  rows = rows_read(rows);
  inputs.values = scratch.take<bf16>(rows * inputs.stride);
  inputs.scales = scratch.take<float>(rows);
  inputs.shifts = scratch.take<int32_t>(rows * inputs.groups);
}

extern "C" int skipdecode_step(int set, const Step *step);

static bool ends(const Greedy &run, int64_t token) {
  for (int e = 0; e < run.end_count; e++)
    if (token == run.ends[e]) return true;
  return false;
}

// The tokens of a pass: the text of each, and its number among the text's tokens after the first one.
struct Tokens {
  int set, count = 0;
  const Step &first;
  const Greedy &run;
  int32_t *text, *row, *column;
  int64_t *token, *position, *found;
  float *probability, *cos, *sin, *logits;

  Tokens(int set, const Step &first, const Greedy &run, int64_t most) : set(set), first(first), run(run) {
    int64_t vocabulary = first.head->outputs;
    of_texts.need(most * (3 * 4 + 3 * 8 + 4 * (1 + 2 * first.rotated + vocabulary)) + 64 * 10);
    text = of_texts.take<int32_t>(most), row = of_texts.take<int32_t>(most), column = of_texts.take<int32_t>(most);
    token = of_texts.take<int64_t>(most), position = of_texts.take<int64_t>(most), found = of_texts.take<int64_t>(most);
    probability = of_texts.take<float>(most);
    cos = of_texts.take<float>(most * first.rotated), sin = of_texts.take<float>(most * first.rotated);
    logits = of_texts.take<float>(most * vocabulary);
  }
  void add(int t, int place, int64_t id) {
    int r = count++;
    text[r] = t;
    row[r] = first.row[t];
    column[r] = first.column[t] + place;
    token[r] = id;
    if (run.position_ids) position[r] = run.position_ids[(int64_t)place * first.tokens + t];
    int64_t from = place * run.rotary_token + (int64_t)t * first.rotary_stride;
    if (!first.rotated) return;
    __builtin_memcpy(cos + (int64_t)r * first.rotated, first.cos + from, 4 * first.rotated);
    __builtin_memcpy(sin + (int64_t)r * first.rotated, first.sin + from, 4 * first.rotated);
  }
  // Run them through a model's layers and head, and choose the token after each. Returns as `skipdecode_step` does.
  int choose(const Layer *layers, const Linear *head, const int32_t *running, int layer_count, int with_probability) {
    Step step = first;
    step.layers = layers, step.head = head;
    step.running = running, step.layer_count = layer_count, step.tokens = count;
    step.token_ids = token, step.position_ids = position, step.row = row, step.column = column, step.logits = logits;
    step.cos = cos, step.sin = sin, step.rotary_stride = first.rotated;
    step.one_token_a_row = 1;
    for (int r = 1; r < count; r++) step.one_token_a_row &= text[r] != text[r - 1];
    if (skipdecode_step(set, &step)) return 1;
    SETS[set].choose(logits, count, first.head->outputs, step.cache_type == BFLOAT16, step.threads, found,
                     with_probability ? probability : 0);
    return 0;
  }
};

#pragma GCC visibility push(default)
extern "C" {

// The sizes of the structs, by which a caller checks that it has the same version of them.
int skipdecode_layout() { return sizeof(Block) * 1000000 + sizeof(Step) * 1000 + sizeof(Greedy) + sizeof(Drafts); }

int skipdecode_sets() { return sizeof SETS / sizeof *SETS; }
const char *skipdecode_set_name(int set) { return SETS[set].name; }
int skipdecode_has_set(int set) { return has(set); }

// 0; or 1, and nothing is computed, where an id is out of its table's range.
int skipdecode_step(int set, const Step *step) {
  for (int i = 0; step->token_ids && i < step->tokens; i++) {
    if (step->token_ids[i] < 0 || step->token_ids[i] >= step->token_count) return 1;
    if (step->positions && (step->position_ids[i] < 0 || step->position_ids[i] >= step->position_count)) return 1;
  }
  int64_t rows = step->tokens, n = step->hidden_size, qkv = 0, attended = 0, inner = 0, columns = 0, head_dim = 0;
  Buffers buffers = {};
  buffers.inputs.by_floats = SETS[set].by_floats;
  for (int i = 0; i < step->layer_count; i++) {
    const Block &block = *step->layers[step->running[i]].block;
    int64_t width = 0;
    for (int p = 0; p < block.projections; p++) width += block.qkv[p].outputs;
    if (width > qkv) qkv = width;
    if (block.heads * block.head_dim > attended) attended = block.heads * block.head_dim;
    if (block.up.outputs > inner) inner = block.up.outputs;
    if (block.head_dim > head_dim) head_dim = block.head_dim;
    widest(block.qkv[0], buffers.inputs);
    widest(block.out, buffers.inputs);
    widest(block.up, buffers.inputs);
    widest(block.down, buffers.inputs);
  }
  if (step->logits) widest(*step->head, buffers.inputs);
  for (int i = 0; i < rows; i++)
    if (step->column[i] >= columns) columns = step->column[i] + 1;
  buffers.columns = (columns + 63) / 16 * 16;  // of scores, which are computed 32 at a time
  buffers.of_thread = buffers.columns * (step->last ? TOGETHER + head_dim : 1);
  int64_t last = step->last_count;
  scratch.need(4 * (rows * (3 * n + qkv + attended + inner) + last * n + step->threads * buffers.of_thread) + 64 * 9 +
               bytes_of(buffers.inputs, rows, step->threads));
  buffers.alone = scratch.take<float>(last * n);
  buffers.hidden = step->hidden ? step->hidden : scratch.take<float>(rows * n);
  buffers.normed = scratch.take<float>(rows * n);
  buffers.feed = scratch.take<float>(rows * n);
  buffers.qkv = scratch.take<float>(rows * qkv);
  buffers.attended = scratch.take<float>(rows * attended);
  buffers.inner = scratch.take<float>(rows * inner);
  buffers.scores = scratch.take<float>(step->threads * buffers.of_thread);
  lay_out(buffers.inputs, rows, step->threads);
  SETS[set].run_step(*step, buffers);
  return 0;
}

// The maximum number of new tokens of a text; -1 where `skipdecode_step` returns 1.
int skipdecode_greedy(int set, const Step *first, const Greedy *run) {
  int texts = first->tokens, most = 0;
  Tokens tokens(set, *first, *run, texts);
  for (int t = 0; t < texts; t++) {
    run->counts[t] = 0;
    if (run->most[t] > 0) tokens.add(t, 0, first->token_ids[t]);
  }
  for (int i = 0; i < run->steps && tokens.count; i++) {
    if (tokens.choose(first->layers, first->head, run->running[i], run->layer_counts[i], 0)) return -1;
    most = i + 1;
    int going = tokens.count;
    tokens.count = 0;
    for (int r = 0; r < going; r++) {
      int t = tokens.text[r];
      int64_t found = run->chosen[(int64_t)i * texts + t] = tokens.found[r];
      if (++run->counts[t] < run->most[t] && !ends(*run, found)) tokens.add(t, i + 1, found);
    }
  }
  return most;
}

// Rounds of drafts under a schedule, which one pass of all layers verifies. Returns as `skipdecode_greedy` does.
int skipdecode_lossless(int set, const Step *first, const Greedy *run, const Drafts *rule) {
  int texts = first->tokens, steps = run->steps, most = 0, running = texts;
  Tokens tokens(set, *first, *run, (int64_t)texts * (steps + 1));
  of_drafts.need(texts * (8 * (steps + 2) + 4) + 64 * 3);
  int64_t *drafts = of_drafts.take<int64_t>((int64_t)texts * (steps + 1));  // the last token of each text, and its drafts
  int64_t *last = of_drafts.take<int64_t>(texts);
  float *reach = of_drafts.take<float>(texts);
  for (int t = 0; t < texts; t++) {
    run->counts[t] = 0;
    last[t] = run->most[t] > 0 ? first->token_ids[t] : -1;
  }
  for (int round = 0; round < rule->rounds; round++) {
    int32_t *drafted = rule->drafted + (int64_t)round * texts, *agreed = rule->agreed + (int64_t)round * texts;
    float *probabilities = rule->probabilities + (int64_t)round * steps * texts;
    tokens.count = running = 0;
    for (int t = 0; t < texts; t++) {
      drafted[t] = 0;
      agreed[t] = -1;
      reach[t] = 1;
      drafts[(int64_t)t * (steps + 1)] = last[t];
      if (last[t] < 0) continue;
      running++;
      if (run->most[t] > run->counts[t] + 1 && steps && reach[t] > rule->worth[0]) tokens.add(t, run->counts[t], last[t]);
    }
    if (!running) break;
    for (int i = 0; i < steps && tokens.count; i++) {
      if (tokens.choose(rule->layers, rule->head, run->running[i], run->layer_counts[i], 1)) return -1;
      int going = tokens.count;
      tokens.count = 0;
      for (int r = 0; r < going; r++) {
        int t = tokens.text[r], kind = 0;
        int64_t found = drafts[(int64_t)t * (steps + 1) + ++drafted[t]] = tokens.found[r];
        float probability = probabilities[(int64_t)i * texts + t] = tokens.probability[r];
        while (kind + 1 < rule->kinds && probability > rule->bounds[kind]) kind++;
        reach[t] *= rule->shares[kind];
        int room = run->most[t] - run->counts[t] - 1 - drafted[t];
        if (i + 1 < steps && room > 0 && !ends(*run, found) && reach[t] > rule->worth[i + 1])
          tokens.add(t, run->counts[t] + i + 1, found);
      }
    }
    for (int t = 0; t < texts; t++)
      for (int i = 0; last[t] >= 0 && i <= drafted[t]; i++)
        tokens.add(t, run->counts[t] + i, drafts[(int64_t)t * (steps + 1) + i]);
    if (tokens.choose(first->layers, first->head, rule->all_running, rule->all_count, 0)) return -1;
    for (int r = 0; r < tokens.count;) {
      int t = tokens.text[r];
      const int64_t *mine = drafts + (int64_t)t * (steps + 1) + 1, *theirs = tokens.found + r;
      int same = 0, ended = 0;
      while (same < drafted[t] && mine[same] == theirs[same]) same++;
      agreed[t] = same;
      for (int i = 0; i <= same && !ended; i++) {
        run->chosen[(int64_t)run->counts[t] * texts + t] = theirs[i];
        ended = ++run->counts[t] >= run->most[t] || ends(*run, theirs[i]);
      }
      last[t] = ended ? -1 : theirs[same];
      if (run->counts[t] > most) most = run->counts[t];
      r += drafted[t] + 1;
    }
  }
  return most;
}

void skipdecode_linear(int set, const Linear *linear, const float *x, int rows, int threads, float *y) {
  Buffers buffers = {};
  buffers.inputs.by_floats = SETS[set].by_floats;
  widest(*linear, buffers.inputs);
  scratch.need(bytes_of(buffers.inputs, rows, threads));
  lay_out(buffers.inputs, rows, threads);
  SETS[set].run_linear(*linear, x, rows, threads, buffers, y);
}

// Write a packed copy of weights [outputs][inputs], in float32 or bfloat16, to the struct's weights and scales.
void skipdecode_pack(int set, const Linear *linear, const void *weight, int type, int threads) {
  SETS[set].pack(*linear, weight, type, threads);
}
}
#pragma GCC visibility pop
