// Products of 8-bit weights with inputs that are rounded to 8 bits on the way, in whole numbers.
//
// Two neighbours along k are multiplied and added by one instruction (vpmaddwd) into 32 bits. Sums are exact up to 2^17 - 1
// columns, whatever their order is: a row's product depends neither on the rows beside it nor on threads.
#include "bodies.h"
#include "panels.h"

// 8-bit codes of a row as `reference.quantize_input` finds them, with zeros up to a multiple of 8; returns their scale. No
// whole number is NaN: where a code would be, the scale is, and with it the whole product of the row, as it should be.
static float quantized(const float *x, int64_t depth, const float *input_scale, int16_t *codes) {
    const float scale = input_scale ? *input_scale : scale_of_codes(x, depth);
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 has_nan = _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k += 8) {
        __m256 exact = _mm256_div_ps(load(x + k, depth - k), _mm256_set1_ps(scale));
        if (depth - k < 8)  // 0 / 0 behind the last
            exact = _mm256_and_ps(exact, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(depth - k), places)));
        has_nan = _mm256_or_ps(has_nan, _mm256_cmp_ps(exact, exact, _CMP_UNORD_Q));
        exact = _mm256_min_ps(_mm256_max_ps(exact, _mm256_set1_ps(-128)), _mm256_set1_ps(127));
        __m256i wide = _mm256_cvtps_epi32(exact);  // half to even
        __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
        _mm_store_si128((__m128i *)(codes + k), narrow);
    }
    return _mm256_movemask_ps(has_nan) ? NAN : scale;
}

// Rows of codes, each with its scale.
struct Coded {
    const int16_t *codes;
    const float *scales;
    int64_t stride;
};

// What is applied to the sums of a panel: [columns] scales and bias; bias may be null.
struct Finish {
    const float *scales, *bias;
    int64_t columns;
};

// y[0..ROWS, 0..columns] of one panel, [pairs, 16, 2].
template <int ROWS>
static void multiply_codes(const int8_t *panel, const Coded &x, int64_t pairs, const Finish &finish, float *y, int64_t y_stride) {
    __m256i sums[ROWS][2];
    UNROLL for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < pairs; k++, panel += 2 * WIDTH) {
        __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)panel));
        __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(panel + WIDTH)));
        UNROLL for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            memcpy(&pair, x.codes + r * x.stride + 2 * k, sizeof(pair));
            __m256i factors = _mm256_set1_epi32(pair);
            sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(factors, first));
            sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(factors, second));
        }
    }
    UNROLL for (int half = 0; half < 2; half++) {
        int64_t columns = finish.columns - 8 * half;
        if (columns <= 0) return;
        __m256 scales = load(finish.scales + 8 * half, columns);
        __m256 bias = finish.bias ? load(finish.bias + 8 * half, columns) : _mm256_setzero_ps();
        UNROLL for (int r = 0; r < ROWS; r++) {
            __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][half]), _mm256_set1_ps(x.scales[r]));
            product = _mm256_mul_ps(product, scales);
            asm("" : "+x"(product));  // rounded before the bias is added: the compiler makes no fused multiply-add of it
            store(y + r * y_stride + 8 * half, finish.bias ? _mm256_add_ps(product, bias) : product, columns);
        }
    }
}

// y [rows, width] = codes of x [rows, depth] . weight^T * scale of the row * scales + bias, rounded after each operation;
// panels [ceil(width / 16), ceil(depth / 2), 16, 2], zeros where the weight has no more columns; scales and bias [width],
// bias may be null; input_scale one number, or null for one a row; depth at most 2^17 - 1.
void int8_gemm(const Product &product, const float *x, float *y, int64_t rows, int threads) {
    int64_t depth = product.depth, width = product.width;
    const int8_t *panels = (const int8_t *)product.weight;
    const float *scales = product.scales, *bias = product.bias, *input_scale = product.input_scale;
    int64_t pairs = (depth + 1) / 2, stride = (depth + 7) / 8 * 8, part = rows_at_once(stride * sizeof(int16_t));
    if (part > rows) part = rows;
    int16_t *codes = (int16_t *)_mm_malloc(part * (stride * sizeof(int16_t) + sizeof(float)), 64);
    float *row_scales = (float *)(codes + part * stride);
    for (int64_t start = 0; start < rows; start += part) {
        int64_t count = rows - start < part ? rows - start : part;
        parallel(count, 2 * depth * count, threads, [=](int64_t r) {
            row_scales[r] = quantized(x + (start + r) * depth, depth, input_scale, codes + r * stride);
        });
        parallel(panels_of(width), depth * width * count, threads, [=](int64_t p) {
            const int8_t *panel = panels + p * pairs * 2 * WIDTH;
            Finish finish{scales + p * WIDTH, bias ? bias + p * WIDTH : nullptr, columns_of(p, width)};
            in_tiles<TILE_ROWS>(count, [&](auto n, int64_t r) {
                Coded own{codes + r * stride, row_scales + r, stride};
                multiply_codes<n>(panel, own, pairs, finish, y + (start + r) * width + p * WIDTH, width);
            });
        });
    }
    _mm_free(codes);
}
