// What is computed between products, row by row: see quantkit_kernels/reference for what each operation means.
#include "bodies.h"

template <class T>
static void norm_row(const T *x, const T *residual, const float *weight, T *total, T *out, int64_t columns, float eps) {
    __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    const T *from = x;
    if (residual) from = total;
    for (int64_t i = 0; i < columns; i += 8) {
        if (residual) store(total + i, _mm256_add_ps(load(x + i, columns - i), load(residual + i, columns - i)), columns - i);
        __m256 row = load(from + i, columns - i);
        squares[i / 8 % 2] = _mm256_fmadd_ps(row, row, squares[i / 8 % 2]);
    }
    __m256 scale = _mm256_set1_ps(1.0f / sqrtf(sum(_mm256_add_ps(squares[0], squares[1])) / columns + eps));
    for (int64_t i = 0; i < columns; i += 8) {
        __m256 normed = _mm256_mul_ps(load(from + i, columns - i), scale);
        store(out + i, _mm256_mul_ps(normed, load(weight + i, columns - i)), columns - i);
    }
}

template <class T> static void silu_mul_row(const T *x, T *out, int64_t columns) {
    const __m256 one = _mm256_set1_ps(1.0f), minus = _mm256_set1_ps(-0.0f);
    for (int64_t i = 0; i < columns; i += 8) {
        __m256 gate = load(x + i, columns - i), up = load(x + columns + i, columns - i);
        __m256 gated = _mm256_div_ps(gate, _mm256_add_ps(one, exponential(_mm256_xor_ps(gate, minus))));
        store(out + i, _mm256_mul_ps(gated, up), columns - i);
    }
}

template <class T> static void turn_head(T *head, const float *cos, const float *sin, int64_t half, bool interleaved) {
    for (int64_t i = 0; i < half; i += 8) {
        int64_t count = half - i < 8 ? half - i : 8;
        T pairs[2][8] = {};
        T *first = head + i, *second = first + half;
        if (interleaved) {
            for (int64_t j = 0; j < 2 * count; j++) pairs[j % 2][j / 2] = head[2 * i + j];
            first = pairs[0], second = pairs[1];
        }
        __m256 x = load(first, count), y = load(second, count), c = load(cos + i, count), s = load(sin + i, count);
        store(first, _mm256_fmsub_ps(x, c, _mm256_mul_ps(y, s)), count);
        store(second, _mm256_fmadd_ps(y, c, _mm256_mul_ps(x, s)), count);
        if (interleaved)
            for (int64_t j = 0; j < 2 * count; j++) head[2 * i + j] = pairs[j % 2][j / 2];
    }
}

// One row of a head into the cache; with a scale as codes, whose scale is written beside.
template <class From, class To> static void store_row(const From *from, To *to, float *scale, int64_t columns) {
    __m256 divisor = _mm256_set1_ps(1.0f);
    if (scale) {
        *scale = scale_of_codes(from, columns);
        divisor = _mm256_set1_ps(*scale);
    }
    for (int64_t i = 0; i < columns; i += 8) {
        __m256 x = load(from + i, columns - i);
        store(to + i, scale ? _mm256_div_ps(x, divisor) : x, columns - i);
    }
}

template <class From, class To> static void store_token(const Stored &part, int64_t token, int64_t slot, int64_t block_size, int64_t heads) {
    To *to = (To *)part.cache + slot / block_size * part.block_stride + slot % block_size * part.slot_stride;
    const From *from = (const From *)part.from + token * part.token_stride;
    for (int64_t h = 0; h < heads; h++)
        store_row(from + h * part.head_stride, to + h * part.cache_head_stride,
                  part.scale ? part.scale + slot * heads + h : nullptr, part.columns);
}

extern "C" {

void rms_norm(int type, const void *x, int64_t stride, const void *residual, int64_t residual_stride, const float *weight,
              void *total, void *out, int64_t rows, int64_t columns, float eps, int threads) {
    by_type(type, [=]<class T>(T *) {
        parallel(rows, rows * columns, threads, [=](int64_t i) {
            norm_row((const T *)x + i * stride, residual ? (const T *)residual + i * residual_stride : nullptr, weight,
                     residual ? (T *)total + i * columns : nullptr, (T *)out + i * columns, columns, eps);
        });
    });
}

void silu_mul(int type, const void *x, int64_t stride, void *out, int64_t rows, int64_t columns, int threads) {
    by_type(type, [=]<class T>(T *) {
        parallel(rows, 8 * rows * columns, threads,
                 [=](int64_t i) { silu_mul_row((const T *)x + i * stride, (T *)out + i * columns, columns); });
    });
}

void rotary_embedding(int type, void *heads, int64_t token_stride, int64_t head_stride, const float *cos, const float *sin,
                      int64_t tokens, int64_t num_heads, int64_t half, int interleaved, int threads) {
    by_type(type, [=]<class T>(T *) {
        parallel(tokens, tokens * num_heads * half, threads, [=](int64_t t) {
            for (int64_t h = 0; h < num_heads; h++)
                turn_head((T *)heads + t * token_stride + h * head_stride, cos + t * half, sin + t * half, half, interleaved);
        });
    });
}

// False, and nothing is written, if a slot is outside the cache.
int store_kv_cache(int from_type, int to_type, const Stored *key, const Stored *value, const int64_t *slots, int64_t tokens,
                   int64_t heads, int64_t blocks, int64_t block_size, int threads) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < -1 || slots[t] >= blocks * block_size) return false;
    by_type(from_type, [=]<class From>(From *) {
        by_cache_type(to_type, [=]<class To>(To *) {
            parallel(tokens, tokens * heads * (key->columns + value->columns), threads, [=](int64_t t) {
                if (slots[t] < 0) return;
                store_token<From, To>(*key, t, slots[t], block_size, heads);
                store_token<From, To>(*value, t, slots[t], block_size, heads);
            });
        });
    });
    return true;
}
}
