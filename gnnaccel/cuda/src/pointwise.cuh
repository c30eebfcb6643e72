// Functions in the texts of pointwise operations (cuda/messages/expression.py).
#pragma once

// A division without its branches: the last bit may be another one.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }
__device__ __forceinline__ float sign(float x) { return (float)((x > 0.f) - (x < 0.f)); }
__device__ __forceinline__ float gelu(float x) {
    return __fmul_rn(0.5f * x, 1.f + erff(x * 0.70710678119f));
}
__device__ __forceinline__ float gelu_slope(float x) {
    return 0.5f * (1.f + erff(x * 0.70710678119f)) + x * 0.39894228040f * expf(-0.5f * x * x);
}
__device__ __forceinline__ float gelu_bend(float x) {
    return tanhf(0.79788456080f * (x + 0.044715f * x * x * x));
}
__device__ __forceinline__ float gelu_tanh(float x) {
    return __fmul_rn(0.5f * x, 1.f + gelu_bend(x));
}
__device__ __forceinline__ float gelu_tanh_slope(float x) {
    const float t = gelu_bend(x);
    return 0.5f * (1.f + t)
        + 0.5f * x * (1.f - t * t) * 0.79788456080f * (1.f + 3.f * 0.044715f * x * x);
}
