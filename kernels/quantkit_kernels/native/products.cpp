// Products with weights that are widened in registers: rows of float32 times panels of 16 rows of the weight.
//
// A row is summed over k from the first to the last, with one accumulator for each output, however many rows there are:
// a row's product does not depend on the rows beside it.
#include "bodies.h"
#include "panels.h"

// [K, 16] of float32 or float16.
template <class T> struct Dense {
    const T *numbers;
    template <class Use> void each(int64_t depth, Use use) const {
        for (int64_t k = 0; k < depth; k++) use(k, load8(numbers + k * WIDTH), load8(numbers + k * WIDTH + 8));
    }
};

// [K, 8] bytes: column j in the lower half of byte j, column j + 8 in the upper; for each group of K 16 scales, then 16
// numbers that a code of 0 is worth.
struct Codes4 {
    const uint8_t *codes;
    const float *grid;
    int64_t group_size;
    template <class Use> void each(int64_t depth, Use use) const {
        const __m128i low = _mm_set1_epi8(15);
        const float *scale = grid;
        for (int64_t start = 0; start < depth; start += group_size, scale += 2 * WIDTH) {
            __m256 scales[2] = {load8(scale), load8(scale + 8)}, zeros[2] = {load8(scale + 16), load8(scale + 24)};
            for (int64_t k = start; k < start + group_size; k++) {
                __m128i both = _mm_loadl_epi64((const __m128i *)(codes + k * WIDTH / 2));
                __m256 first = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(both, low)));
                __m256 second = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(both, 4), low)));
                use(k, _mm256_fmadd_ps(first, scales[0], zeros[0]), _mm256_fmadd_ps(second, scales[1], zeros[1]));
            }
        }
    }
};

// y[0..ROWS, 0..columns] of one panel.
template <int ROWS, class Panel>
static void multiply_rows(const Panel &panel, const float *x, int64_t depth, float *y, int64_t y_stride, int64_t columns,
                          const float *bias) {
    __m256 sums[ROWS][2];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int half = 0; half < 2; half++)
            sums[r][half] = bias && columns > 8 * half ? load(bias + 8 * half, columns - 8 * half) : _mm256_setzero_ps();
    panel.each(depth, [&](int64_t k, __m256 first, __m256 second) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            __m256 factor = _mm256_broadcast_ss(x + r * depth + k);
            sums[r][0] = _mm256_fmadd_ps(factor, first, sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(factor, second, sums[r][1]);
        }
    });
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int half = 0; half < 2; half++)
            if (columns > 8 * half) store(y + r * y_stride + 8 * half, sums[r][half], columns - 8 * half);
}

template <int MOST, class Panel>
static void tiles(const Panel &panel, const float *x, int64_t rows, int64_t depth, float *y, int64_t y_stride, int64_t columns,
                  const float *bias) {
    in_tiles<MOST>(rows, [&](auto n, int64_t r) {
        multiply_rows<n>(panel, x + r * depth, depth, y + r * y_stride, y_stride, columns, bias);
    });
}

// body(panel, x, rows, y) for every panel, and for the rows in parts that stay in a core's cache.
template <class Body>
static void by_panel(const float *x, float *y, int64_t rows, int64_t depth, int64_t width, int threads, Body body) {
    int64_t part = rows_at_once(depth * sizeof(float));
    for (int64_t start = 0; start < rows; start += part) {
        int64_t count = rows - start < part ? rows - start : part;
        parallel(panels_of(width), depth * width * count, threads,
                 [=](int64_t panel) { body(panel, x + start * depth, count, y + start * width); });
    }
}

// y [rows, width] = x [rows, depth] . weight^T + bias; weight [panels, depth, 16] float16.
static void half_gemm(const Product &product, const float *x, float *y, int64_t rows, int threads) {
    int64_t depth = product.depth, width = product.width;
    const float16 *weight = (const float16 *)product.weight;
    const float *bias = product.bias;
    by_panel(x, y, rows, depth, width, threads, [=](int64_t p, const float *x, int64_t rows, float *y) {
        Dense<float16> panel{weight + p * depth * WIDTH};
        tiles<TILE_ROWS>(panel, x, rows, depth, y + p * WIDTH, width, columns_of(p, width), bias ? bias + p * WIDTH : nullptr);
    });
}

// The same of 4-bit codes, [panels, depth, 8] bytes; grids [panels, depth / group_size, 2, 16] float32.
static void int4_gemm(const Product &product, const float *x, float *y, int64_t rows, int threads) {
    int64_t depth = product.depth, width = product.width, group_size = product.group_size;
    const uint8_t *codes = (const uint8_t *)product.weight;
    const float *grids = product.scales, *bias = product.bias;
    by_panel(x, y, rows, depth, width, threads, [=](int64_t p, const float *x, int64_t rows, float *y) {
        Codes4 panel{codes + p * depth * WIDTH / 2, grids + p * (depth / group_size) * 2 * WIDTH, group_size};
        const float *own = bias ? bias + p * WIDTH : nullptr;
        y += p * WIDTH;
        if (rows <= 4) return tiles<4>(panel, x, rows, depth, y, width, columns_of(p, width), own);
        float *wide = (float *)_mm_malloc(depth * WIDTH * sizeof(float), 64);
        panel.each(depth, [=](int64_t k, __m256 first, __m256 second) {
            store8(wide + k * WIDTH, first);
            store8(wide + k * WIDTH + 8, second);
        });
        tiles<TILE_ROWS>(Dense<float>{wide}, x, rows, depth, y, width, columns_of(p, width), own);
        _mm_free(wide);
    });
}

// y [rows, width] = x [rows, depth] . weight^T + bias.
extern "C" void multiply(const Product *product, const float *x, float *y, int64_t rows, int threads) {
    switch (product->kind) {
        case HALF: return half_gemm(*product, x, y, rows, threads);
        case INT4: return int4_gemm(*product, x, y, rows, threads);
        case INT8_INPUTS: return int8_gemm(*product, x, y, rows, threads);
    }
    __builtin_trap();
}
