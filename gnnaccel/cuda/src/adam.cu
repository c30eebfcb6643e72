// A step of Adam over up to TENSORS tensors, each of which is read and written once.
//
// The operations are those of torch's own way (torch.optim.adam, foreach=True), rounded where it
// rounds: each of its operations on lists of tensors is a kernel of its own. Products that it rounds
// before a sum are rounded here (--fmad=false), and fmaf stands where its kernels have one.
//
// Tensor i takes the blocks from start<i> on; none where that is beyond the grid.
#include "common.cuh"

#define THREADS 256
#define EACH 4
#define ALL(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define TENSOR(i) , float* p##i, const float* g##i, float* m##i, float* v##i, float* w##i, i64 n##i, \
    int start##i
#define PICK(i)                                                      \
    if (block >= start##i) {                                         \
        p = p##i, g = g##i, m = m##i, v = v##i, w = w##i;            \
        count = n##i, first = start##i;                              \
    }

// lr: -lr / (1 - beta1 ** steps); root: sqrt(1 - beta2 ** steps); mix, rest: 1 - beta1, 1 - beta2.
// decay: what is added of the parameter to its gradient; keep: what is left of it before the step.
extern "C" __global__ void __launch_bounds__(THREADS)
adam(float lr, float root, float mix, float beta2, float rest, float eps, float decay, float keep,
     int maximize ALL(TENSOR)) {
    const int block = blockIdx.x;
    float *p = p0, *m = m0, *v = v0, *w = w0;
    const float* g = g0;
    i64 count = n0;
    int first = 0;
    ALL(PICK)
    const i64 base = (i64)(block - first) * (THREADS * EACH) + threadIdx.x;
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
