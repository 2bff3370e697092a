// What the bodies are called with: from Python, where cpu_native*.py hold the same structures, and by decoder.cpp.
#pragma once
#include "vectors.h"

// Memory of keys or values: those of new tokens [tokens, heads, columns], and a cache [blocks, block_size, heads, columns].
struct Stored {
    const void *from;
    int64_t token_stride, head_stride, columns;
    void *cache;
    int64_t block_stride, slot_stride, cache_head_stride;
    float *scale;  // [blocks, block_size, heads], or null
};

// Memory of keys or values as attention reads it.
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

// A weight, and how it lies in memory: HALF and INT4 see products.cpp, INT8 whole_numbers.cpp.
enum Kind { HALF, INT4, INT8_INPUTS };
struct Product {
    int kind;
    int64_t depth, width, group_size;
    const void *weight;
    const float *scales;       // of codes
    const float *bias;         // [width], or null
    const float *input_scale;  // of INT8_INPUTS, or null for one a row
};

extern "C" {
void rms_norm(int type, const void *x, int64_t stride, const void *residual, int64_t residual_stride, const float *weight,
              void *total, void *out, int64_t rows, int64_t columns, float eps, int threads);
void silu_mul(int type, const void *x, int64_t stride, void *out, int64_t rows, int64_t columns, int threads);
void rotary_embedding(int type, void *heads, int64_t token_stride, int64_t head_stride, const float *cos, const float *sin,
                      int64_t tokens, int64_t num_heads, int64_t half, int interleaved, int threads);
int store_kv_cache(int from_type, int to_type, const Stored *key, const Stored *value, const int64_t *slots, int64_t tokens,
                   int64_t heads, int64_t blocks, int64_t block_size, int threads);
int paged_attention(int cache_type, const Attention *attention, int threads);
void multiply(const Product *product, const float *x, float *y, int64_t rows, int threads);
}

void int8_gemm(const Product &product, const float *x, float *y, int64_t rows, int threads);
