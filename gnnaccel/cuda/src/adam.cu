// A step of Adam over any number of tensors, each of which is read and written once.
//
// The operations are those of torch's own way (torch.optim.adam, foreach=True), rounded where it
// rounds: each of its operations on lists of tensors is a kernel of its own. Products that it rounds
// before a sum are rounded here (--fmad=false), and fmaf stands where its kernels have one.
//
// table [6, tensors]: addresses of parameters, averages, averages of squares and the largest of
// these (or 0), the tensors' sizes, and the block with which each begins, which is that of the next
// one for an empty tensor. gradients [tensors]: addresses; null where they are arguments.
#include "common.cuh"

#define THREADS 256
#define EACH 4
#define ALL(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define GRADIENT(i) , const float* g##i
#define PICK(i) \
    if (at == i) g = g##i;

// lr: -lr / (1 - beta1 ** steps); root: sqrt(1 - beta2 ** steps); mix, rest: 1 - beta1, 1 - beta2.
// decay: what is added of the parameter to its gradient; keep: what is left of it before the step.
extern "C" __global__ void __launch_bounds__(THREADS)
adam(float lr, float root, float mix, float beta2, float rest, float eps, float decay, float keep,
     int maximize, const i64* __restrict__ table, int tensors, const i64* __restrict__ gradients
     ALL(GRADIENT)) {
    const i64 block = blockIdx.x, *starts = table + 5 * (i64)tensors;
    int at = 0, end = tensors;  // the last tensor that does not begin behind this block
    while (end - at > 1) {
        const int middle = (at + end) / 2;
        if (starts[middle] <= block) at = middle;
        else end = middle;
    }
    float *p = (float*)table[at], *m = (float*)table[tensors + at];
    float *v = (float*)table[2 * tensors + at], *w = (float*)table[3 * tensors + at];
    const i64 count = table[4 * tensors + at], first = starts[at];
    const float* g = gradients ? (const float*)gradients[at] : g0;
    if (!gradients) {
        ALL(PICK)
    }
    const i64 base = (block - first) * (THREADS * EACH) + threadIdx.x;
    float param[EACH], grad[EACH], mean[EACH], square[EACH], most[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const i64 at = base + e * THREADS;
        if (at < count)
            param[e] = p[at], grad[e] = g[at], mean[e] = m[at], square[e] = v[at],
            most[e] = w ? w[at] : 0.f;
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const i64 at = base + e * THREADS;
        if (at >= count) return;
        float d = maximize ? -grad[e] : grad[e], x = param[e];
        if (keep != 1.f) x *= keep;
        if (decay != 0.f) d = fmaf(decay, x, d);
        const float apart = d - mean[e];
        const float average = mix < 0.5f ? fmaf(mix, apart, mean[e]) : fmaf(-apart, 1.f - mix, d);
        const float squared = fmaf(rest, d * d, square[e] * beta2);
        float under = squared;
        if (w) {
            // a NaN counts as the larger one, as in torch.maximum
            under = most[e] > squared || most[e] != most[e] ? most[e] : squared;
            w[at] = under;
        }
        m[at] = average, v[at] = squared;
        p[at] = fmaf(lr, average / (sqrtf(under) / root + eps), x);
    }
}
