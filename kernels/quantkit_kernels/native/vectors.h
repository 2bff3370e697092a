// Eight numbers at a time: the types of memory, what is read as float32 and rounded once when it is written; and threads.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define UNROLL _Pragma("GCC unroll 8")  // so that an array with an element for each turn is registers

// Numbers of types in calls; `cpu_native.TYPES` holds the same.
enum Type { FLOAT32, BFLOAT16, FLOAT16, INT8 };

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

static inline __m256 load8(const float *from) { return _mm256_loadu_ps(from); }
static inline __m256 load8(const bfloat16 *from) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline __m256 load8(const float16 *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
static inline __m256 load8(const int8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

static inline void store8(float *to, __m256 x) { _mm256_storeu_ps(to, x); }
static inline void store8(bfloat16 *to, __m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
    __m256i high = _mm256_srli_epi32(rounded, 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}
static inline void store8(float16 *to, __m256 x) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
static inline void store8(int8_t *to, __m256 x) {  // half to even, cut off at the ends; NaN is 0
    int32_t wide[8];
    __m256 within = _mm256_min_ps(_mm256_set1_ps(127), _mm256_max_ps(_mm256_set1_ps(-128), x));  // NaN stays NaN
    _mm256_storeu_si256((__m256i *)wide, _mm256_cvtps_epi32(within));
    for (int i = 0; i < 8; i++) to[i] = (int8_t)wide[i];
}

// The first `count` of eight; behind them zeros are read, and nothing is written.
template <class T> static inline __m256 load(const T *from, int64_t count) {
    if (count >= 8) return load8(from);
    T part[8] = {};
    memcpy(part, from, count * sizeof(T));
    return load8(part);
}
template <class T> static inline void store(T *to, __m256 x, int64_t count) {
    if (count >= 8) return store8(to, x);
    T part[8];
    store8(part, x);
    memcpy(to, part, count * sizeof(T));
}

static inline __m128 halves(__m256 x, __m128 (*join)(__m128, __m128)) {
    __m128 four = join(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = join(four, _mm_movehl_ps(four, four));
    return join(two, _mm_movehdup_ps(two));
}
static inline __m128 add4(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
static inline __m128 max4(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
static inline float sum(__m256 x) { return _mm_cvtss_f32(halves(x, add4)); }
static inline float largest(__m256 x) { return _mm_cvtss_f32(halves(x, max4)); }  // of numbers: a NaN may be passed over

// The scale of a row's 8-bit codes, as `reference.quantize_input` finds it: a 127th of the largest magnitude, 1 for zeros,
// NaN if one is. Magnitudes are compared as bit patterns, whose order is theirs and in which NaN is the largest.
template <class T> static inline float scale_of_codes(const T *row, int64_t columns) {
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; i < columns; i += 8) {
        __m256i bits = _mm256_castps_si256(load(row + i, columns - i));
        most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    int32_t lanes[8], highest = 0;
    _mm256_storeu_si256((__m256i *)lanes, most);
    for (int32_t lane : lanes) highest = lane > highest ? lane : highest;
    float scale;
    memcpy(&scale, &highest, sizeof(scale));
    scale /= 127;
    return scale == 0 ? 1 : scale;
}

// e^x to within 2 units of the last place; 0 below -87.7 and infinite above 88.4; a NaN stays one.
// x = n ln 2 + r, and e^r by its Taylor polynomial of degree 7, which for |r| <= ln(2) / 2 leaves out less than 6e-9.
// n is -127 to 128, whose powers of 2 are 0 and infinity when they are put together from their exponent's bits.
static inline __m256 exponential(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(89), _mm256_max_ps(_mm256_set1_ps(-88), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 y = _mm256_set1_ps(1.0f / 5040);
    const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float factor : factors) y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(factor));
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(exponent));
}

// body(i) for every i below count, by so many threads in whatever order; `work` is about how many numbers are touched.
constexpr int64_t LEAST_WORK = 1 << 15;  // a thread is woken in the time in which another works through so many
template <class Body> static inline void parallel(int64_t count, int64_t work, int threads, Body body) {
    if (threads < 2 || count < 2 || work < LEAST_WORK) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    int64_t step = count / (threads * 8) + 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, step)
    for (int64_t i = 0; i < count; i++) body(i);
}

// call((T *)nullptr) with the type of floating point that a number stands for; another number ends the process.
template <class Call> static inline void by_type(int type, Call call) {
    switch (type) {
        case FLOAT32: return call((float *)nullptr);
        case BFLOAT16: return call((bfloat16 *)nullptr);
        case FLOAT16: return call((float16 *)nullptr);
    }
    __builtin_trap();
}

// The same with the types of caches.
template <class Call> static inline void by_cache_type(int type, Call call) {
    if (type == INT8) return call((int8_t *)nullptr);
    by_type(type, call);
}
