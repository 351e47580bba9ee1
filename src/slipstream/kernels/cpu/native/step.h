// A whole forward in one call: the structs that describe a stack of layers and one pass of rows through it.
#pragma once

#include "matrix.h"

extern "C" {

struct SlipLayer {
    SlipLinear qkv, output, gate_up, down;  // parts of gate_up: gate, up
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm;  // both or neither
    int32_t pattern;               // which of the batches its attention follows
};

struct SlipStack {
    int32_t layers, hidden, heads, kv_heads, head_dim, inner;
    float eps;
    const SlipLayer* layer;
    const float* norm;
};

struct SlipForward {
    const SlipStack* stack;
    const SlipBatch* batches;  // the same rows once per attention pattern
    int32_t patterns, threads;
    float* const* keys;             // per layer, pools [pages, kv heads, page tokens, dim]
    float* const* values;
    float* x;                       // [rows, hidden]: the embeddings, afterwards the residual stream
    const float *cosines, *sines;   // [positions, dim]; the first half of the sines negated
    int32_t taps;                   // residual streams to keep, side by side per row
    const int32_t* tap_layers;      // -1: the embeddings
    float* tapped;                  // [rows, taps * hidden]
    float* hidden;                  // [rows, hidden] after the final norm
    int32_t wanted;                 // rows that go through the head
    const int32_t* wanted_rows;
    const SlipLinear* head;
    float* logits;                  // [wanted, vocabulary]
};

// Taps of committed rows on their way into the draft context of all draft layers.
struct SlipContext {
    const SlipLinear *fc, *projection;  // projection: keys and values of layer 0, of layer 1, ...
    const float *norm, *k_norms;        // k_norms [layers, dim], or null
    float eps;
    int32_t rows, layers, kv_heads, head_dim, page_tokens, threads;
    const float* taps;  // [rows, fc inputs]
    const int32_t *positions, *pages, *offsets;
    const float *cosines, *sines;
    float *keys, *values;  // [layers, pages, kv heads, page tokens, dim]
    int64_t layer_stride;  // floats from one layer's pool to the next
};

}  // extern "C"
