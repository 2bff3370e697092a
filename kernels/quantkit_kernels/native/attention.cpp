// paged_attention: see quantkit_kernels/reference/attention.py. Keys are read where they lie, with a running softmax.
//
// The keys of a query are cut into parts of fixed length, which threads share; what they give is merged in order. So a
// query's result depends neither on the number of threads nor on what else is computed.
#include "bodies.h"

constexpr int64_t PART = 256;      // keys of a part
constexpr int TILE_KEYS = 32;      // keys whose scores are held at a time
constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_GROUP = 4;       // query heads that read the same keys together

static const float NOTHING[MAX_HEAD_DIM] = {};

// Where a query stands: its sequence's table, and which keys it sees.
struct Query {
    int64_t token;
    const int32_t *table;
    int64_t first, last;
};

static Query find_query(const Attention &a, int64_t token) {
    int64_t s = 0, end = a.sequences;  // the last sequence that starts at or before the token
    while (end - s > 1) {
        int64_t middle = (s + end) / 2;
        (a.starts[middle] <= token ? s : end) = middle;
    }
    int64_t last = a.lengths[s] - a.starts[s + 1] + token + 1;
    return {token, a.tables + s * a.table_stride, a.window && last > a.window ? last - a.window : 0, last};
}

// cap * tanh(score / cap)
__attribute__((noinline)) static void soften(float *scores, int count, float cap) {
    const __m256 one = _mm256_set1_ps(1), two = _mm256_set1_ps(2);
    for (int j = 0; j < count; j += 8) {
        __m256 e = exponential(_mm256_mul_ps(_mm256_load_ps(scores + j), _mm256_set1_ps(2 / cap)));
        __m256 tanh = _mm256_sub_ps(one, _mm256_div_ps(two, _mm256_add_ps(e, one)));
        _mm256_store_ps(scores + j, _mm256_mul_ps(_mm256_set1_ps(cap), tanh));
    }
}

// Rows of a tile of keys or values: where the first head's numbers lie, and the place of its scale.
template <class K> struct Rows {
    int count = 0;
    const K *keys[TILE_KEYS], *values[TILE_KEYS];
    int64_t scales[TILE_KEYS];
};

// Ask for the numbers of key `j` before they are read: rows lie far apart, and waiting for each would be half of the time.
template <class K> static inline void fetch(const Attention &a, const Rows<K> &rows, int j, int64_t kv_head) {
    if (j >= rows.count) return;
    auto lines = [](const K *row, int64_t columns) {
        for (int64_t i = 0; i < columns; i += 64 / sizeof(K)) _mm_prefetch((const char *)(row + i), _MM_HINT_T0);
    };
    lines(rows.keys[j] + kv_head * a.key.head_stride, a.key.columns);
    lines(rows.values[j] + kv_head * a.value.head_stride, a.value.columns);
}

static inline __m128 half_sum(__m256 x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }

// The scores of KEYS keys from number `j` on.
template <int GROUP, int KEYS, class K>
static inline void score_keys(const Attention &a, const K *const *keys, int64_t offset, const float *queries,
                              float (*scores)[TILE_KEYS], int j) {
    int64_t columns = a.key.columns;
    __m256 sums[GROUP][KEYS] = {};
    for (int64_t d = 0; d < columns; d += 8) {
        __m256 key[KEYS];
        UNROLL for (int i = 0; i < KEYS; i++) key[i] = load8(keys[j + i] + offset + d);
        UNROLL for (int g = 0; g < GROUP; g++) {
            __m256 query = _mm256_load_ps(queries + g * columns + d);
            UNROLL for (int i = 0; i < KEYS; i++) sums[g][i] = _mm256_fmadd_ps(key[i], query, sums[g][i]);
        }
    }
    UNROLL for (int g = 0; g < GROUP; g++) {
        if constexpr (KEYS == 1) {
            scores[g][j] = sum(sums[g][0]);
        } else {
            __m128 both = _mm_hadd_ps(half_sum(sums[g][0]), half_sum(sums[g][1]));
            _mm_storel_pi((__m64 *)(scores[g] + j), _mm_hadd_ps(both, both));
        }
    }
}

template <int GROUP, class K>
static void score_tile(const Attention &a, const Rows<K> &rows, const Rows<K> &next, int64_t kv_head, const float *queries,
                       float (*scores)[TILE_KEYS]) {
    int64_t offset = kv_head * a.key.head_stride;
    int j = 0;
    for (; j + 2 <= rows.count; j += 2) {
        fetch(a, next, j, kv_head), fetch(a, next, j + 1, kv_head);
        score_keys<GROUP, 2>(a, rows.keys, offset, queries, scores, j);
    }
    if (j < rows.count) score_keys<GROUP, 1>(a, rows.keys, offset, queries, scores, j);
    for (j = 0; j < rows.count && a.key.scale; j++)
        for (int g = 0; g < GROUP; g++) scores[g][j] *= a.key.scale[rows.scales[j] + kv_head];
}

// What scores are measured from: the largest of them, and 0 if all are -infinity, so that their weights are 0 and not NaN.
static inline float origin(float most) { return most == -INFINITY ? 0 : most; }

// Scores become weights; what was summed so far is brought to the new largest score.
__attribute__((noinline)) static void weigh(float *scores, int count, float &most, float &total, float *sums, int64_t columns) {
    for (int j = count; j < (count + 7) / 8 * 8; j++) scores[j] = -INFINITY;
    float before = most;
    __m256 highest = _mm256_set1_ps(most);
    for (int j = 0; j < count; j += 8) highest = _mm256_max_ps(_mm256_load_ps(scores + j), highest);
    most = largest(highest);
    __m256 all = _mm256_setzero_ps();
    for (int j = 0; j < count; j += 8) {
        __m256 weights = exponential(_mm256_sub_ps(_mm256_load_ps(scores + j), _mm256_set1_ps(origin(most))));
        _mm256_store_ps(scores + j, weights);
        all = _mm256_add_ps(all, weights);
    }
    if (before != most) {
        float factor = expf(before - most);
        total *= factor;
        for (int64_t d = 0; d < columns; d += 8)
            _mm256_store_ps(sums + d, _mm256_mul_ps(_mm256_load_ps(sums + d), _mm256_set1_ps(factor)));
    }
    total += sum(all);
}

// 8 * WIDE columns of the values, times the weights of each head, onto the sums.
template <int GROUP, int WIDE, class K>
static void add_columns(const Rows<K> &rows, int64_t offset, const float (*weights)[TILE_KEYS], float *sums, int64_t stride) {
    __m256 own[GROUP][WIDE];
    UNROLL for (int g = 0; g < GROUP; g++)
        UNROLL for (int i = 0; i < WIDE; i++) own[g][i] = _mm256_load_ps(sums + g * stride + 8 * i);
    for (int j = 0; j < rows.count; j++) {
        __m256 value[WIDE];
        UNROLL for (int i = 0; i < WIDE; i++) value[i] = load8(rows.values[j] + offset + 8 * i);
        UNROLL for (int g = 0; g < GROUP; g++) {
            __m256 weight = _mm256_broadcast_ss(weights[g] + j);
            UNROLL for (int i = 0; i < WIDE; i++) own[g][i] = _mm256_fmadd_ps(value[i], weight, own[g][i]);
        }
    }
    UNROLL for (int g = 0; g < GROUP; g++)
        UNROLL for (int i = 0; i < WIDE; i++) _mm256_store_ps(sums + g * stride + 8 * i, own[g][i]);
}

template <int GROUP, class K>
static void add_tile(const Attention &a, const Rows<K> &rows, int64_t kv_head, const float (*weights)[TILE_KEYS], float *sums) {
    int64_t d = 0, columns = a.value.columns, offset = kv_head * a.value.head_stride;
    for (; d + 16 <= columns; d += 16) add_columns<GROUP, 2>(rows, offset + d, weights, sums + d, columns);
    if (d < columns) add_columns<GROUP, 1>(rows, offset + d, weights, sums + d, columns);
}

// The numbers of one head of a query, times the scale.
__attribute__((noinline)) static void read_query(const Attention &a, int64_t token, int64_t head, float *to) {
    by_type(a.type, [&]<class T>(T *) {
        const T *from = (const T *)a.query + token * a.token_stride + head * a.head_stride;
        for (int64_t d = 0; d < a.key.columns; d += 8)
            _mm256_store_ps(to + d, _mm256_mul_ps(load8(from + d), _mm256_set1_ps(a.scale)));
    });
}

__attribute__((noinline)) static void write_out(const Attention &a, int64_t row, const float *sums, float total) {
    by_type(a.type, [&]<class T>(T *) {
        for (int64_t d = 0; d < a.value.columns; d += 8)
            store8((T *)a.out + row * a.value.columns + d, _mm256_div_ps(_mm256_loadu_ps(sums + d), _mm256_set1_ps(total)));
    });
}

// Running softmax of some heads of one query over a part of its keys.
struct Running {
    float *queries, *sums, *most, *total;  // [heads, key.columns], [heads, value.columns], [heads], [heads]
};

// A tile of keys, for GROUP heads from number `head` of those that run, which share a head of keys.
template <int GROUP, class K>
static void attend_tile(const Attention &a, const Rows<K> &rows, const Rows<K> &next, int64_t kv_head, Running &run, int64_t head) {
    alignas(32) float scores[GROUP][TILE_KEYS];
    float *sums = run.sums + head * a.value.columns;
    score_tile<GROUP>(a, rows, next, kv_head, run.queries + head * a.key.columns, scores);
    for (int g = 0; g < GROUP; g++) {
        if (a.softcap) soften(scores[g], rows.count, a.softcap);
        weigh(scores[g], rows.count, run.most[head + g], run.total[head + g], sums + g * a.value.columns, a.value.columns);
        for (int j = 0; j < rows.count && a.value.scale; j++) scores[g][j] *= a.value.scale[rows.scales[j] + kv_head];
    }
    add_tile<GROUP>(a, rows, kv_head, scores, sums);
}

// The rows of the keys from `first` on, as many as a tile holds.
template <class K> static void find_rows(const Attention &a, const int32_t *table, int64_t first, int64_t last, Rows<K> &rows) {
    int64_t place = first / a.block_size, slot = first % a.block_size;
    rows.count = last <= first ? 0 : last - first < TILE_KEYS ? (int)(last - first) : TILE_KEYS;
    for (int j = 0; j < rows.count; j++) {
        int64_t block = table[place];
        rows.keys[j] = (const K *)a.key.numbers + block * a.key.block_stride + slot * a.key.slot_stride;
        rows.values[j] = (const K *)a.value.numbers + block * a.value.block_stride + slot * a.value.slot_stride;
        rows.scales[j] = (block * a.block_size + slot) * a.kv_heads;
        if (++slot == a.block_size) slot = 0, place++;
    }
}

// Part number `part` of a query's keys, for the heads that share the heads first_kv .. last_kv of keys: into the output
// if it is the only part, else into what is merged later. A tile's rows are read for all heads while they are at hand.
template <class K> static void attend_part(const Attention &a, const Query &q, int64_t part, int64_t first_kv, int64_t last_kv) {
    int64_t first = q.first + part * PART, last = first + PART < q.last ? first + PART : q.last;
    int64_t group = a.heads / a.kv_heads, head = first_kv * group, heads = (last_kv - first_kv) * group;
    int64_t keys = a.key.columns, values = a.value.columns;
    float *memory = (float *)_mm_malloc(heads * (keys + values + 2) * sizeof(float), 64);
    Running run{memory, memory + heads * keys, memory + heads * (keys + values), memory + heads * (keys + values + 1)};
    for (int64_t h = 0; h < heads; h++) {
        read_query(a, q.token, head + h, run.queries + h * keys);
        run.most[h] = -INFINITY, run.total[h] = 0;
    }
    memset(run.sums, 0, heads * values * sizeof(float));
    Rows<K> tiles[2];
    find_rows(a, q.table, first, last, tiles[0]);
    for (int64_t start = first, turn = 0; start < last; start += TILE_KEYS, turn ^= 1) {
        Rows<K> &rows = tiles[turn], &next = tiles[turn ^ 1];
        find_rows(a, q.table, start + TILE_KEYS, last, next);
        for (int64_t kv = first_kv; kv < last_kv; kv++) {
            int64_t h = (kv - first_kv) * group, end = h + group;
            for (; end - h >= MAX_GROUP; h += MAX_GROUP) attend_tile<MAX_GROUP>(a, rows, next, kv, run, h);
            if (end - h == 3) attend_tile<3>(a, rows, next, kv, run, h);
            if (end - h == 2) attend_tile<2>(a, rows, next, kv, run, h);
            if (end - h == 1) attend_tile<1>(a, rows, next, kv, run, h);
        }
    }
    for (int64_t h = 0; h < heads; h++) {
        int64_t row = q.token * a.heads + head + h;
        if (q.last - q.first <= PART) {
            write_out(a, row, run.sums + h * values, run.total[h]);
            continue;
        }
        float *to = a.partial + (row * a.parts + part) * (values + 2);
        memcpy(to, run.sums + h * values, values * sizeof(float));
        to[values] = run.most[h], to[values + 1] = run.total[h];
    }
    _mm_free(memory);
}

static void merge(const Attention &a, const Query &q, int64_t head) {
    int64_t columns = a.value.columns, row = q.token * a.heads + head, parts = (q.last - q.first + PART - 1) / PART;
    float *to = a.partial + row * a.parts * (columns + 2);
    for (int64_t p = 1; p < parts; p++) {
        const float *from = to + p * (columns + 2);
        float most = from[columns] > to[columns] ? from[columns] : to[columns];
        float own = expf(to[columns] - origin(most)), other = expf(from[columns] - origin(most));
        for (int64_t d = 0; d < columns; d++) to[d] = to[d] * own + from[d] * other;
        to[columns] = most, to[columns + 1] = to[columns + 1] * own + from[columns + 1] * other;
    }
    write_out(a, row, to, to[columns + 1]);
}

template <class K> static void attend_all(const Attention &a, int threads) {
    int64_t tokens = a.tokens, work = tokens * a.heads * a.parts * PART * a.key.columns;
    int64_t splits = tokens * a.parts < 2 * threads ? a.kv_heads : 1;  // of the heads, where tokens are too few to share out
    parallel(tokens * a.parts * splits, work, threads, [&](int64_t item) {
        int64_t part = item / splits % a.parts, kv_heads = a.kv_heads / splits, first_kv = item % splits * kv_heads;
        Query q = find_query(a, item / splits / a.parts);
        if (q.last <= q.first && part == 0)
            for (int64_t h = first_kv * a.heads / a.kv_heads; h < (first_kv + kv_heads) * a.heads / a.kv_heads; h++)
                write_out(a, q.token * a.heads + h, NOTHING, 1);
        if (q.first + part * PART < q.last) attend_part<K>(a, q, part, first_kv, first_kv + kv_heads);
    });
    if (a.parts > 1)
        parallel(tokens * a.heads, tokens * a.heads * a.parts * a.value.columns, threads, [&](int64_t item) {
            Query q = find_query(a, item / a.heads);
            if (q.last - q.first > PART) merge(a, q, item % a.heads);
        });
}

static bool is_within(const Attention &a) {
    for (int64_t s = 0; s < a.sequences; s++) {
        if (a.starts[s] > a.starts[s + 1] || a.lengths[s] < 0 || a.lengths[s] > a.max_length) return false;
        for (int64_t b = 0; b * a.block_size < a.lengths[s]; b++)
            if (a.tables[s * a.table_stride + b] < 0 || a.tables[s * a.table_stride + b] >= a.blocks) return false;
    }
    return a.starts[0] == 0 && a.starts[a.sequences] == a.tokens;
}

// False, and nothing is written, if a length or a block is outside what is there.
extern "C" int paged_attention(int cache_type, const Attention *a, int threads) {
    if (!is_within(*a)) return false;
    by_cache_type(cache_type, [=]<class K>(K *) { attend_all<K>(*a, threads); });
    return true;
}
