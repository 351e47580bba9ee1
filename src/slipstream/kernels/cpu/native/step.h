// A whole forward in one call: the structs that describe a stack of layers and one pass of rows through it.
#pragma once

#include "matrix.h"

extern "C" {

struct SlipLayer {
    SlipLinear qkv, output, gate_up, down;  // gate_up has two parts, gate and up
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm;  // both or neither
    int32_t pattern;               // index of the batch that describes its attention
};

struct SlipStack {
    int32_t layers, hidden, heads, kv_heads, head_dim, inner;
    float eps;
    const SlipLayer* layer;
    const float* norm;
};

struct SlipForward {
    const SlipStack* stack;
    const SlipBatch* batches;  // the same rows, once per attention pattern
    int32_t patterns, threads;
    float* const* keys;             // a pool [pages, kv heads, page tokens, dim] per layer
    float* const* values;
    float* x;                       // [rows, hidden], the embeddings and then the residual stream
    const float *cosines, *sines;   // [positions, dim]; the first half of the sines is negated
    int32_t taps;                   // residual streams to keep, side by side per row
    const int32_t* tap_layers;      // -1 means the embeddings
    float* tapped;                  // [rows, taps * hidden]
    float* hidden;                  // [rows, hidden] after the final norm
    int32_t wanted;                 // how many rows go through the head
    const int32_t* wanted_rows;
    const SlipLinear* head;
    float* logits;                  // [wanted, vocabulary]
};

// The job of turning the taps of committed rows into the draft context of all draft layers.
struct SlipContext {
    const SlipLinear *fc, *projection;  // projection has keys and values of layer 0, then of layer 1, ...
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
