// paged_attention: see quantkit_kernels/reference/attention.py. Keys are read where they lie, with a running softmax.
//
// The keys of a query are cut into parts of fixed length, which threads share; what they give is merged in order. So a
// query's result depends neither on the number of threads nor on what else is computed.
#include "vectors.h"

constexpr int64_t PART = 256;      // keys of a part
constexpr int TILE = 32;           // keys whose scores are held at a time
constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_GROUP = 4;       // query heads that read the same keys together

static const float NOTHING[MAX_HEAD_DIM] = {};

struct Cache {
    const void *numbers;
    int64_t block_stride, slot_stride, head_stride, columns;
    const float *scale;  // [blocks, block_size, kv_heads] of codes, or null
};

struct Attention {
    int type;  // of query and out
    const void *query;
    int64_t token_stride, head_stride;
    Cache key, value;
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *starts, *lengths;
    int64_t sequences, tokens, blocks, heads, kv_heads, block_size, max_length;
    float scale, softcap;    // softcap 0 is none
    int64_t window, parts;   // window 0 is none; no sequence has more parts
    void *out;               // [tokens, heads, value.columns]
    float *partial;          // [tokens, heads, parts, value.columns + 2]: sums, largest score, sum of weights
};

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

// State of a running softmax over some heads.
template <int GROUP> struct Running {
    float most[GROUP], total[GROUP];
    alignas(32) float sums[GROUP][MAX_HEAD_DIM];
};

template <int GROUP, class K>
static void score_tile(int64_t columns, const float (*query)[MAX_HEAD_DIM], const K **keys, const float *factors, int count,
                       float (*scores)[TILE]) {
    for (int j = 0; j < count; j++) {
        __m256 sums[GROUP] = {};
        for (int64_t d = 0; d < columns; d += 8) {
            __m256 key = load8(keys[j] + d);
            UNROLL for (int g = 0; g < GROUP; g++) sums[g] = _mm256_fmadd_ps(key, _mm256_load_ps(query[g] + d), sums[g]);
        }
        UNROLL for (int g = 0; g < GROUP; g++) scores[g][j] = sum(sums[g]) * factors[j];
    }
}

// Scores become weights; what was summed so far is brought to the new largest score.
__attribute__((noinline)) static void weigh(float *scores, int count, float &most, float &total, float *sums, int64_t columns) {
    for (int j = count; j < (count + 7) / 8 * 8; j++) scores[j] = -INFINITY;
    float before = most;
    for (int j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
    __m256 all = _mm256_setzero_ps();
    for (int j = 0; j < count; j += 8) {
        __m256 weights = exponential(_mm256_sub_ps(_mm256_load_ps(scores + j), _mm256_set1_ps(most)));
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

template <int GROUP, class K>
static void add_tile(const float (*weights)[TILE], const K **values, int count, int64_t columns, float (*sums)[MAX_HEAD_DIM]) {
    for (int64_t d = 0; d < columns; d += 8) {
        __m256 own[GROUP];
        UNROLL for (int g = 0; g < GROUP; g++) own[g] = _mm256_load_ps(sums[g] + d);
        for (int j = 0; j < count; j++) {
            __m256 value = load8(values[j] + d);
            UNROLL for (int g = 0; g < GROUP; g++) own[g] = _mm256_fmadd_ps(value, _mm256_broadcast_ss(weights[g] + j), own[g]);
        }
        UNROLL for (int g = 0; g < GROUP; g++) _mm256_store_ps(sums[g] + d, own[g]);
    }
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

// GROUP heads from `head` on, of one query, over the keys first .. last.
template <int GROUP, class K>
static void attend(const Attention &a, const Query &q, int64_t head, int64_t first, int64_t last, Running<GROUP> &run) {
    alignas(32) float query[GROUP][MAX_HEAD_DIM], scores[GROUP][TILE];
    for (int g = 0; g < GROUP; g++) {
        read_query(a, q.token, head + g, query[g]);
        run.most[g] = -INFINITY, run.total[g] = 0;
        memset(run.sums[g], 0, a.value.columns * sizeof(float));
    }
    int64_t kv_head = head / (a.heads / a.kv_heads);
    for (int64_t start = first; start < last; start += TILE) {
        int count = last - start < TILE ? (int)(last - start) : TILE;
        const K *keys[TILE], *values[TILE];
        float key_factors[TILE], value_factors[TILE];
        for (int j = 0; j < count; j++) {
            int64_t block = q.table[(start + j) / a.block_size], slot = (start + j) % a.block_size;
            keys[j] = (const K *)a.key.numbers + block * a.key.block_stride + slot * a.key.slot_stride + kv_head * a.key.head_stride;
            values[j] = (const K *)a.value.numbers + block * a.value.block_stride + slot * a.value.slot_stride + kv_head * a.value.head_stride;
            int64_t place = (block * a.block_size + slot) * a.kv_heads + kv_head;
            key_factors[j] = a.key.scale ? a.key.scale[place] : 1;
            value_factors[j] = a.value.scale ? a.value.scale[place] : 1;
        }
        score_tile<GROUP, K>(a.key.columns, query, keys, key_factors, count, scores);
        for (int g = 0; g < GROUP; g++) {
            if (a.softcap) soften(scores[g], count, a.softcap);
            weigh(scores[g], count, run.most[g], run.total[g], run.sums[g], a.value.columns);
            for (int j = 0; j < count && a.value.scale; j++) scores[g][j] *= value_factors[j];
        }
        add_tile<GROUP, K>(scores, values, count, a.value.columns, run.sums);
    }
}

// GROUP heads over part number `part`: into the output if it is the only one, else into what is merged later.
template <int GROUP, class K> static void attend_part(const Attention &a, const Query &q, int64_t head, int64_t part) {
    int64_t first = q.first + part * PART, last = first + PART < q.last ? first + PART : q.last;
    Running<GROUP> run;
    attend<GROUP, K>(a, q, head, first, last, run);
    for (int g = 0; g < GROUP; g++) {
        int64_t row = q.token * a.heads + head + g, columns = a.value.columns;
        if (q.last - q.first <= PART) {
            write_out(a, row, run.sums[g], run.total[g]);
            continue;
        }
        float *to = a.partial + (row * a.parts + part) * (columns + 2);
        memcpy(to, run.sums[g], columns * sizeof(float));
        to[columns] = run.most[g], to[columns + 1] = run.total[g];
    }
}

static void merge(const Attention &a, const Query &q, int64_t head) {
    int64_t columns = a.value.columns, row = q.token * a.heads + head, parts = (q.last - q.first + PART - 1) / PART;
    float *to = a.partial + row * a.parts * (columns + 2);
    for (int64_t p = 1; p < parts; p++) {
        const float *from = to + p * (columns + 2);
        float most = from[columns] > to[columns] ? from[columns] : to[columns];
        float own = expf(to[columns] - most), other = expf(from[columns] - most);
        for (int64_t d = 0; d < columns; d++) to[d] = to[d] * own + from[d] * other;
        to[columns] = most, to[columns + 1] = to[columns + 1] * own + from[columns + 1] * other;
    }
    write_out(a, row, to, to[columns + 1]);
}

template <class K> static void attend_all(const Attention &a, int threads) {
    int64_t tokens = a.tokens, group = a.heads / a.kv_heads, work = tokens * a.heads * a.parts * PART * a.key.columns;
    parallel(tokens * a.kv_heads * a.parts, work, threads, [&](int64_t item) {
        int64_t part = item % a.parts, kv_head = item / a.parts % a.kv_heads;
        Query q = find_query(a, item / a.parts / a.kv_heads);
        int64_t head = kv_head * group, end = head + group;
        if (q.last <= q.first && part == 0)
            for (int64_t h = head; h < end; h++) write_out(a, q.token * a.heads + h, NOTHING, 1);
        if (q.first + part * PART >= q.last) return;
        for (; end - head >= MAX_GROUP; head += MAX_GROUP) attend_part<MAX_GROUP, K>(a, q, head, part);
        if (end - head == 3) attend_part<3, K>(a, q, head, part);
        if (end - head == 2) attend_part<2, K>(a, q, head, part);
        if (end - head == 1) attend_part<1, K>(a, q, head, part);
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
    if (cache_type == INT8) attend_all<int8_t>(*a, threads);
    by_type(cache_type, [=]<class K>(K *) { attend_all<K>(*a, threads); });
    return true;
}
