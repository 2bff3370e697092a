// A step of all layers of a decoder in one call: what quantkit/serve/models/decoder.py does operation by operation, by the
// same bodies in the same order, so that the numbers are the same to the bit.
#include <chrono>

#include "bodies.h"

// One layer; pointers are null for what it does not have. Weights of norms are float32.
struct DecoderLayer {
    Product qkv, output, gate_up, down;
    const float *attention_norm, *feed_forward_norm, *behind_attention, *behind_feed_forward, *query_norm, *key_norm;
    int64_t turns;   // which of the step's, -1 for none
    int64_t window;  // places that a query sees, 0 for all
    Cache key, value;
};

// What is the same for all layers. Rows of activations are float32.
struct DecoderStep {
    int64_t tokens, width, heads, kv_heads, head_dim, inner;  // inner: columns between gate_up and down
    float eps, scale, softcap;
    int type, cache_type;  // of keys and values, and as they are kept
    const float *const *cos, *const *sin;  // for each set of turns [tokens, half]
    const int64_t *halves;
    const int64_t *slots;  // [tokens]
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *starts, *lengths;
    int64_t sequences, blocks, block_size, max_length, parts;
    float *x, *residual;  // [tokens, width]: in, the embedding and nothing; out, what the last layer adds, and to what
    float *normed, *qkv, *attended, *gate_up, *gated, *partial;
    void *narrow;  // [tokens, 2 kv_heads, head_dim] of `type`; not read if that is float32
    double *seconds;  // [3] to which the time is added that products, attention and all else take
};
enum Share { PRODUCTS, ATTENTION, ELSE };

// What has passed since the last lap goes to a share.
struct Clock {
    double *seconds;
    std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
    void lap(Share share) {
        auto now = std::chrono::steady_clock::now();
        seconds[share] += std::chrono::duration<double>(now - last).count();
        last = now;
    }
};

static void add_norm(const DecoderStep &s, const float *weight, bool is_first, int threads) {
    if (is_first) memcpy(s.residual, s.x, s.tokens * s.width * sizeof(float));
    const float *from = is_first ? s.residual : s.x, *residual = is_first ? nullptr : s.residual;
    rms_norm(FLOAT32, from, s.width, residual, s.width, weight, s.residual, s.normed, s.tokens, s.width, s.eps, threads);
}

static void norm_in_place(const DecoderStep &s, const float *weight, int threads) {
    if (weight) rms_norm(FLOAT32, s.x, s.width, nullptr, 0, weight, nullptr, s.x, s.tokens, s.width, s.eps, threads);
}

static void norm_heads(const DecoderStep &s, float *first, int64_t heads, int64_t stride, const float *weight, int threads) {
    for (int64_t t = 0; weight && t < s.tokens; t++) {
        float *own = first + t * stride;
        rms_norm(FLOAT32, own, s.head_dim, nullptr, 0, weight, nullptr, own, heads, s.head_dim, s.eps, threads);
    }
}

// Keys and values, side by side behind the queries of each row, in the type in which they are cached.
static const void *narrow(const DecoderStep &s, const float *from, int64_t stride) {
    if (s.type == FLOAT32) return from;
    int64_t columns = 2 * s.kv_heads * s.head_dim;
    by_type(s.type, [&]<class T>(T *) {
        for (int64_t t = 0; t < s.tokens; t++)
            for (int64_t i = 0; i < columns; i += 8)
                store((T *)s.narrow + t * columns + i, load(from + t * stride + i, columns - i), columns - i);
    });
    return s.narrow;
}

static bool attend(const DecoderLayer &layer, const DecoderStep &s, Clock &clock, int threads) {
    int64_t stride = (s.heads + 2 * s.kv_heads) * s.head_dim;
    float *keys = s.qkv + s.heads * s.head_dim;
    norm_heads(s, s.qkv, s.heads, stride, layer.query_norm, threads);
    norm_heads(s, keys, s.kv_heads, stride, layer.key_norm, threads);
    if (layer.turns >= 0)
        rotary_embedding(FLOAT32, s.qkv, stride, s.head_dim, s.cos[layer.turns], s.sin[layer.turns], s.tokens,
                         s.heads + s.kv_heads, s.halves[layer.turns], false, threads);
    const char *from = (const char *)narrow(s, keys, stride);
    int64_t size = s.type == FLOAT32 ? 4 : 2, from_stride = s.type == FLOAT32 ? stride : 2 * s.kv_heads * s.head_dim;
    auto stored = [&](const char *from, const Cache &cache) {
        return Stored{from, from_stride, s.head_dim, s.head_dim, (void *)cache.numbers, cache.block_stride,
                      cache.slot_stride, cache.head_stride, (float *)cache.scale};
    };
    Stored key = stored(from, layer.key), value = stored(from + s.kv_heads * s.head_dim * size, layer.value);
    if (!store_kv_cache(s.type, s.cache_type, &key, &value, s.slots, s.tokens, s.kv_heads, s.blocks, s.block_size, threads))
        return false;
    Attention attention{FLOAT32, s.qkv, stride, s.head_dim, layer.key, layer.value, s.tables, s.table_stride, s.starts, s.lengths,
                        s.sequences, s.tokens, s.blocks, s.heads, s.kv_heads, s.block_size, s.max_length,
                        s.scale, s.softcap, layer.window, s.parts, s.attended, s.partial};
    clock.lap(ELSE);
    bool is_within = paged_attention(s.cache_type, &attention, threads);
    clock.lap(ATTENTION);
    return is_within;
}

// False if a slot, a length or a block is outside what is there.
extern "C" int decoder_layers(const DecoderLayer *layers, int64_t count, const DecoderStep *step, int threads) {
    const DecoderStep &s = *step;
    Clock clock{s.seconds};
    auto product = [&](const Product &weight, const float *x, float *y) {
        clock.lap(ELSE);
        multiply(&weight, x, y, s.tokens, threads);
        clock.lap(PRODUCTS);
    };
    for (int64_t i = 0; i < count; i++) {
        const DecoderLayer &layer = layers[i];
        add_norm(s, layer.attention_norm, i == 0, threads);
        product(layer.qkv, s.normed, s.qkv);
        if (!attend(layer, s, clock, threads)) return false;
        product(layer.output, s.attended, s.x);
        norm_in_place(s, layer.behind_attention, threads);
        add_norm(s, layer.feed_forward_norm, false, threads);
        product(layer.gate_up, s.normed, s.gate_up);
        silu_mul(FLOAT32, s.gate_up, 2 * s.inner, s.gated, s.tokens, s.inner, threads);
        product(layer.down, s.gated, s.x);
        norm_in_place(s, layer.behind_feed_forward, threads);
    }
    clock.lap(ELSE);
    return true;
}
